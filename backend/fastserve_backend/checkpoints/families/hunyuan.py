"""Hunyuan 1 (Tencent 2025): LLaMA with norms of queries and keys after their rotation."""

from __future__ import annotations

from typing import Unpack

from fastserve_kernels.routing_rule import RoutingRule

from fastserve_backend.checkpoints.decoder_config import DecoderConfig, Sizes
from fastserve_backend.checkpoints.experts_config import ExpertsConfig, read_choices
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields
from fastserve_backend.checkpoints.rotary_config import Rotary

_NAMES = (
    ("self_attn.query_layernorm", "self_attn.q_norm"),
    ("self_attn.key_layernorm", "self_attn.k_norm"),
)


def read_hunyuan_dense(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    return _read(raw, common, "hunyuan_v1_dense", None)


def read_hunyuan_moe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Each mixture has one more expert of the same size, which computes all tokens."""
    raw.choice("hidden_act", "silu", ("silu",))
    # The published file names a number for each layer.
    for key in ("num_experts", "moe_topk"):
        raw = raw.with_one_for_all(key)
    count, top_k = read_choices(raw, "num_experts", 1, 1, top_k_key="moe_topk")
    ffn = raw.integer("intermediate_size", 11008)
    experts = ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=ffn,
        routing=RoutingRule(),
        shared_size=ffn,
    )
    return _read(raw, common, "hunyuan_v1_moe", experts)


def _read(
    raw: HFConfig, common: CommonFields, name: str, experts: ExpertsConfig | None
) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, ffn=11008, vocab=290943, positions=2048
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        qk_norm="head",
        qk_norm_follows_rotation=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        layer_names=_NAMES,
        experts=experts,
    )


def _rotary(raw: HFConfig, sizes: Sizes) -> Rotary:
    """A rotation of type "dynamic" with an ``alpha`` has a larger base, whatever a job's length."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.mapping(key)
        if rope is None or "alpha" not in rope:
            continue
        rope.choice("rope_type" if "rope_type" in rope else "type", None, ("dynamic",))
        theta = rope.number("rope_theta", raw.number("rope_theta", 1e4))
        dim = sizes.head_dim
        theta *= rope.number("alpha", None) ** (dim / (dim - 2))
        raw = raw.with_value(key, {"rope_type": "default", "rope_theta": theta})
    return whole_rotary(raw, sizes)
