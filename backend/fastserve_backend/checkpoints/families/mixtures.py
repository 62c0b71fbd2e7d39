"""Mixtures of experts: Mixtral, Qwen's, OLMoE and gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Unpack

from fastserve_kernels.routing_rule import RoutingRule

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    NORMS_AFTER,
    SLIDING,
    DecoderConfig,
    NormNames,
    Sizes,
    read_windows,
)
from fastserve_backend.checkpoints.experts_config import ClampedGate, ExpertsConfig, read_choices
from fastserve_backend.checkpoints.families.qwen import asked_window
from fastserve_backend.checkpoints.families.rotation import whole_rotary, with_default_rope
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields
from fastserve_backend.checkpoints.rotary_config import Rotary

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

MIXTRAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mixtral-8x7b": {
            "model_type": "mixtral",
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "torch_dtype": "bfloat16",
        }
    }
)
QWEN3_MOE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "norm_topk_prob": True,
            "torch_dtype": "bfloat16",
        }
    }
)
OLMOE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "olmoe-1b-7b": {
            "model_type": "olmoe",
            "intermediate_size": 1024,
            "torch_dtype": "bfloat16",
        }
    }
)
GPT_OSS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        name: {
            "model_type": "gpt_oss",
            "num_hidden_layers": layers,
            "num_local_experts": experts,
            "torch_dtype": "bfloat16",
        }
        for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128))
    }
)


def read_mixtral(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Mistral's layers with experts (Jiang et al. 2024)."""
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000,
        positions=131072,
    )  # fmt: skip
    raw.choice("hidden_act", "silu", ("silu",))
    count, top_k = read_choices(raw, "num_local_experts", 8, 2)
    window = raw.optional_integer("sliding_window")
    return DecoderConfig.read(
        raw,
        common,
        "mixtral",
        sizes,
        [whole_rotary(raw, sizes, theta=1e6)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        window_of_layer=(window,) * sizes.layers,
        experts=ExpertsConfig(
            count=count, top_k=top_k, intermediate_size=sizes.ffn, routing=RoutingRule()
        ),
    )


def read_qwen2_moe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Qwen 2's layers with experts, one of which computes all tokens."""
    sizes = Sizes.read(
        raw, layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5632, vocab=151936, positions=32768
    )
    window, last = asked_window(raw), raw.integer("max_window_layers", 28)
    default = [
        FULL if window is None or layer % 2 or layer >= last else SLIDING
        for layer in range(sizes.layers)
    ]
    _, windows = read_windows(raw, window, default)
    shared = raw.integer("shared_expert_intermediate_size", 5632)
    return DecoderConfig.read(
        raw,
        common,
        "qwen2_moe",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        end=(),
        qkv_bias=raw.boolean("qkv_bias", True),
        window_of_layer=windows,
        experts=_qwen_experts(raw, 60, 4, 1408, shared),
        dense_layers=_dense_layers(raw, sizes.layers),
    )


def read_qwen3_moe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Qwen 3's layers with experts."""
    sizes = Sizes.read(
        raw, layers=24, hidden=2048, heads=32, kv_heads=4, ffn=6144, vocab=151936, positions=32768
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "qwen3_moe",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        end=(),
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        window_of_layer=(asked_window(raw),) * sizes.layers,
        experts=_qwen_experts(raw, 128, 8, 768),
        dense_layers=_dense_layers(raw, sizes.layers),
    )


def read_qwen3_vl_moe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """The text model of Qwen3-VL's mixtures."""
    sizes = Sizes.read(
        raw, layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5632, vocab=151936,
        positions=128000,
    )  # fmt: skip
    has_bias = raw.boolean("attention_bias", False)
    experts = _qwen_experts(raw, 60, 4, 1408)
    return DecoderConfig.read(
        raw,
        common,
        "qwen3_moe",
        sizes,
        [whole_rotary(raw, sizes, theta=5e5)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        ties=True,
        end=(),
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        experts=replace(experts, routing=RoutingRule(), may_be_transposed=True),
        dense_layers=_dense_layers(raw, sizes.layers),
    )


def read_olmoe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA's layers with norms of queries and keys, and experts (Muennighoff et al. 2024)."""
    sizes = Sizes.read(raw, layers=16, hidden=2048, heads=16, ffn=2048, vocab=50304, positions=4096)
    return _olmoe(
        raw,
        common,
        "olmoe",
        sizes,
        whole_rotary(raw, sizes),
        (64, 8),
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(50279,),
        norms=NormNames(),
        clip_qkv=raw.optional_number("clip_qkv"),
    )


def read_flex_olmo(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """OLMo 2's layers with experts that were trained apart (Shi et al. 2025)."""
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, ffn=11008, vocab=100352, positions=4096
    )
    return _olmoe(
        raw,
        common,
        "flex_olmo",
        sizes,
        whole_rotary(raw, sizes, theta=5e5),
        (7, 5),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        end=(100257,),
        norms=NORMS_AFTER,
    )


def _olmoe(
    raw: HFConfig,
    common: CommonFields,
    name: str,
    sizes: Sizes,
    rotary: Rotary,
    choices: tuple[int, int],
    *,
    norm_eps: float,
    end: tuple[int, ...],
    norms: NormNames,
    clip_qkv: float | None = None,
) -> DecoderConfig:
    """choices: the family's defaults for the number of experts and of those that a token
    chooses."""
    raw.choice("hidden_act", "silu", ("silu",))
    has_bias = raw.boolean("attention_bias", False)
    count, top_k = read_choices(raw, "num_experts", *choices)
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [rotary],
        norm_eps=norm_eps,
        end=end,
        norms=norms,
        qk_norm="all_heads",
        qkv_bias=has_bias,
        out_bias=has_bias,
        clip_qkv=clip_qkv,
        experts=ExpertsConfig(
            count=count,
            top_k=top_k,
            intermediate_size=sizes.ffn,
            routing=RoutingRule(renormalises=raw.boolean("norm_topk_prob", False)),
        ),
    )


def read_gpt_oss(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """OpenAI's gpt-oss (2025): windows in every other layer, attention sinks, clamped gates."""
    sizes = Sizes.read(
        raw, layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, vocab=201088,
        positions=131072,
    )  # fmt: skip
    raw = with_default_rope(raw, _GPT_OSS_ROPE)
    raw.choice("hidden_act", "silu", ("silu",))
    has_bias = raw.boolean("attention_bias", True)
    default = [FULL if layer % 2 else SLIDING for layer in range(sizes.layers)]
    _, windows = read_windows(raw, raw.optional_integer("sliding_window", 128), default)
    count, top_k = read_choices(raw, "num_local_experts", 128, 4)
    return DecoderConfig.read(
        raw,
        common,
        "gpt_oss",
        sizes,
        [whole_rotary(raw, sizes, theta=150000.0)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
        window_of_layer=windows,
        experts=ExpertsConfig(
            count=count,
            top_k=top_k,
            intermediate_size=sizes.ffn,
            routing=RoutingRule(),
            has_biases=True,
            is_fused=True,
            clamped_gate=ClampedGate(
                raw.number("swiglu_alpha", 1.702), raw.number("swiglu_limit", 7.0)
            ),
        ),
    )


def _qwen_experts(
    raw: HFConfig, count: int, top_k: int, ffn: int, shared: int = 0
) -> ExpertsConfig:
    """The arguments are the family's defaults, except the shared expert's size."""
    raw.choice("hidden_act", "silu", ("silu",))
    count, top_k = read_choices(raw, "num_experts", count, top_k)
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=raw.integer("moe_intermediate_size", ffn),
        routing=RoutingRule(renormalises=raw.boolean("norm_topk_prob", False)),
        shared_size=shared,
        shared_has_gate=shared > 0,
    )


def _dense_layers(raw: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Those without experts."""
    step, listed = raw.integer("decoder_sparse_step", 1), raw.indices("mlp_only_layers")
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
