"""LLaMA (Touvron et al. 2023), and Apertus, Arcee, CWM, ERNIE 4.5, Helium, InternLM 3,
IQuest-Coder and Seed-OSS with its layers.

Here and in the other families, fields that a config.json leaves out have the defaults that
transformers' configuration class documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    NormNames,
    Sizes,
    read_activation,
    read_windows,
)
from fastserve_backend.checkpoints.families.published import published
from fastserve_backend.checkpoints.families.rotation import whole_rotary, with_default_rope
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields

BUILTIN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-7b": published("llama", 32, 32, 32, 4096, 11008, 2048),
        "llama-13b": published("llama", 40, 40, 40, 5120, 13824, 2048),
        "llama-3-8b": published(
            "llama", 32, 32, 8, 4096, 14336, 8192, vocab_size=128256, rope_theta=500000.0
        ),
        "smollm2-135m": published(
            "llama", 30, 9, 3, 576, 1536, 8192,
            vocab_size=49152, rope_theta=100000.0, tie_word_embeddings=True,
        ),
    }
)  # fmt: skip
_APERTUS_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)
_CWM_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)


def read_llama(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, positions=2048
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "llama",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=raw.boolean("mlp_bias", False),
    )


def read_apertus(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA with norms of queries and keys, and a feed-forward without gate, whose activation is
    learned (Swiss AI 2025)."""
    raw = with_default_rope(raw, _APERTUS_ROPE)
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, ffn=14336, vocab=131072, positions=65536
    )
    raw.choice("hidden_act", "xielu", ("xielu",))
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "apertus",
        sizes,
        [whole_rotary(raw, sizes, theta=12e6)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        norms=NormNames(
            attention_in="attention_layernorm", feed_forward_in="feedforward_layernorm"
        ),
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp=("up_proj", "down_proj"),
        activation="xielu",
    )


def read_arcee(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA with a feed-forward without gate."""
    sizes = Sizes.read(
        raw, layers=32, hidden=2560, heads=32, ffn=18432, vocab=32000, positions=4096
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "arcee",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(128001,),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=raw.boolean("mlp_bias", False),
        mlp=("up_proj", "down_proj"),
        activation=read_activation(raw, "hidden_act", "relu2"),
    )


def read_cwm(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA with windows in three of four layers."""
    raw = with_default_rope(raw, _CWM_ROPE)
    sizes = Sizes.read(
        raw, layers=64, hidden=6144, heads=48, kv_heads=8, head_dim=128, ffn=21504, vocab=128256,
        positions=131072,
    )  # fmt: skip
    _, windows = read_windows(
        raw,
        raw.optional_integer("sliding_window", 8192),
        [SLIDING if layer % 4 else FULL for layer in range(sizes.layers)],
    )
    return DecoderConfig.read(
        raw,
        common,
        "cwm",
        sizes,
        [whole_rotary(raw, sizes, theta=1e6)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(128001, 128008, 128009),
        window_of_layer=windows,
    )


def read_ernie4_5(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA whose rotation turns neighbouring elements."""
    sizes = Sizes.read(
        raw, layers=18, hidden=1024, heads=16, kv_heads=2, head_dim=128, ffn=3072, vocab=103424,
        positions=131072,
    )  # fmt: skip
    has_bias = raw.boolean("use_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "ernie4_5",
        sizes,
        [whole_rotary(raw, sizes, theta=5e5)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        ties=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        rotates_neighbours=True,
    )


def read_helium(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA whose rotation turns neighbouring elements."""
    sizes = Sizes.read(
        raw, layers=24, hidden=2560, heads=20, kv_heads=20, head_dim=128, ffn=7040, vocab=48000,
        positions=4096,
    )  # fmt: skip
    return DecoderConfig.read(
        raw,
        common,
        "helium",
        sizes,
        [whole_rotary(raw, sizes, theta=1e5)],
        norm_eps=raw.number("rms_norm_eps", 1e-8),
        qkv_bias=raw.boolean("attention_bias", False),
        mlp_bias=raw.boolean("mlp_bias", False),
        rotates_neighbours=True,
    )


def read_internlm3(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    raw = raw.renamed({"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    sizes = Sizes.read(
        raw, layers=48, hidden=4096, heads=32, kv_heads=2, head_dim=128, ffn=10240, vocab=128512,
        positions=32768,
    )  # fmt: skip
    has_bias = raw.boolean("attention_bias", False)
    if raw.boolean("mlp_bias", False) != has_bias:
        raise raw.error("mlp_bias", "the same as the bias of attention")
    return DecoderConfig.read(
        raw,
        common,
        "internlm3",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
    )


def read_iquestcoder(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    if raw.boolean("use_sliding_window", False) or "clip_qkv" in raw:
        raise raw.error("use_sliding_window", "false, and no clip_qkv, as in all such models")
    sizes = Sizes.read(
        raw, layers=80, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=27648, vocab=76800,
        positions=131072,
    )  # fmt: skip
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "iquestcoder",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=raw.boolean("mlp_bias", False),
    )


def read_seed_oss(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA with biases on query, key and value."""
    sizes = Sizes.read(
        raw, layers=64, hidden=4096, heads=80, kv_heads=8, head_dim=128, ffn=27648, vocab=155136,
        positions=524288,
    )  # fmt: skip
    return DecoderConfig.read(
        raw,
        common,
        "seed_oss",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        qkv_bias=raw.boolean("attention_bias", True),
        out_bias=raw.boolean("attention_out_bias", False),
        mlp_bias=raw.boolean("mlp_bias", False),
    )
