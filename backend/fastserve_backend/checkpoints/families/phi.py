"""Phi-1 to 2 (Gunasekar et al. 2023); Phi-3, 3.5 and 4 (Abdin et al. 2024): LLaMA with fused
projections and LongRoPE; Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from fastserve_kernels.routing_rule import RoutingRule

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    NormNames,
    Sizes,
    read_activation,
)
from fastserve_backend.checkpoints.experts_config import ExpertsConfig, read_choices
from fastserve_backend.checkpoints.families.rotation import partial_rotary, whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields
from fastserve_backend.checkpoints.rotary_config import Rotary

_PHI_LAYER = (
    ("self_attn.dense", "self_attn.o_proj"),
    ("self_attn.q_layernorm", "self_attn.q_norm"),
    ("self_attn.k_layernorm", "self_attn.k_norm"),
)


def read_phi(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Attention and feed-forward side by side behind one layer norm; biases everywhere."""
    sizes = Sizes.read(raw, layers=24, hidden=2048, heads=32, ffn=8192, vocab=51200, positions=2048)
    return DecoderConfig.read(
        raw,
        common,
        "phi",
        sizes,
        [partial_rotary(raw, sizes, share=0.5)],
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        norm="layer",
        norm_has_bias=True,
        norms=NormNames(feed_forward_in=None),
        qk_norm="layer" if raw.boolean("qk_layernorm", False) else None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        mlp=("fc1", "fc2"),
        activation=read_activation(raw, "hidden_act", "gelu_new"),
        is_parallel=True,
        head_bias=True,
        module_names=(("final_layernorm", "norm"),),
        layer_names=_PHI_LAYER,
    )


def read_phi3(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(raw, layers=32, hidden=3072, heads=32, ffn=8192, vocab=32064, positions=4096)
    return DecoderConfig.read(
        raw,
        common,
        "phi3",
        sizes,
        [partial_rotary(raw, sizes, share=1.0)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(32000,),
        window_of_layer=(raw.optional_integer("sliding_window"),) * sizes.layers,
    )


def read_phimoe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Layer norms, biases, and a router that compares each score with those near it."""
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=6400, vocab=32064, positions=131072
    )
    raw.choice("hidden_act", "silu", ("silu",))
    count, top_k = read_choices(raw, "num_local_experts", 16, 2)
    if top_k != 2:
        raise raw.error("num_experts_per_tok", "2, for which the router's rule is defined")
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "phimoe",
        sizes,
        [_phimoe_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        norm="layer",
        norm_has_bias=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        head_bias=raw.boolean("lm_head_bias", False),
        window_of_layer=(raw.optional_integer("sliding_window"),) * sizes.layers,
        experts=ExpertsConfig(
            count=count,
            top_k=top_k,
            intermediate_size=sizes.ffn,
            routing=RoutingRule(
                renormalises=False, margin=2 * raw.number("router_jitter_noise", 0.01)
            ),
        ),
    )


def _phimoe_rotary(raw: HFConfig, sizes: Sizes) -> Rotary:
    """Of a rotation for long contexts, fields of its own name the factor of sines and cosines."""
    rotary = whole_rotary(raw, sizes, theta=1e6)
    for rope in (raw.mapping("rope_parameters"), raw.mapping("rope_scaling")):
        if rope is None or rope.states("rope_type" if "rope_type" in rope else "type", ["default"]):
            continue
        if "short_mscale" not in rope and "long_mscale" not in rope:
            continue
        scale = rope.number("short_mscale", None)
        if rope.number("long_mscale", None) != scale:
            raise rope.error("long_mscale", f"short_mscale, {scale:g}")
        rotary = replace(rotary, scale=scale)
    return rotary
