"""Gemma 1 to 3 (text) and VaultGemma: norms around both blocks, soft caps, two rotations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    NORMS_AROUND,
    SLIDING,
    DecoderConfig,
    NormNames,
    Sizes,
    read_activation,
    read_windows,
)
from fastserve_backend.checkpoints.families.published import published
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields
from fastserve_backend.checkpoints.rotary_config import read_rotary_by_type

GEMMA3: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma-3-1b": published(
            "gemma3_text", 26, 4, 1, 1152, 6912, 32768, vocab_size=262144, sliding_window=512
        )
    }
)


def read_gemma(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    _refuse_bidirectional(raw)
    sizes = Sizes.read(
        raw, layers=28, hidden=3072, heads=16, kv_heads=16, head_dim=256, ffn=24576, vocab=256000,
        positions=8192,
    )  # fmt: skip
    has_bias = raw.boolean("attention_bias", False)
    # The first releases say "gelu" and mean its approximation.
    activation = read_activation(raw, "hidden_act", "gelu_pytorch_tanh")
    return DecoderConfig.read(
        raw,
        common,
        "gemma",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        ties=True,
        end=(1,),
        norm_plus_one=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        activation="gelu_tanh" if activation == "gelu" else activation,
        embedding_factor=sizes.hidden**0.5,
    )


def read_gemma2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    return _read_gemma2(raw, common, "gemma2", NORMS_AROUND)


def read_vaultgemma(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Gemma 2 without norms after its blocks."""
    norms = NormNames(feed_forward_in="pre_feedforward_layernorm")
    return _read_gemma2(raw, common, "vaultgemma", norms)


def _read_gemma2(raw: HFConfig, common: CommonFields, name: str, norms: NormNames) -> DecoderConfig:
    _refuse_bidirectional(raw)
    sizes = _sizes(raw, vocab=256000, positions=8192)
    default = [FULL if layer % 2 else SLIDING for layer in range(sizes.layers)]
    _, windows = read_windows(raw, raw.optional_integer("sliding_window", 4096), default)
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        ties=True,
        end=(1,),
        norm_plus_one=True,
        norms=norms,
        qkv_bias=has_bias,
        out_bias=has_bias,
        activation=read_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        window_of_layer=windows,
        attention_scale=raw.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=raw.optional_number("attn_logit_softcapping", 50.0),
        logit_soft_cap=raw.optional_number("final_logit_softcapping", 30.0),
        embedding_factor=sizes.hidden**0.5,
    )


def read_gemma3(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """The text model. Five of six layers have a window, and a rotation of their own."""
    _refuse_bidirectional(raw)
    sizes = _sizes(raw, vocab=262208, positions=131072)
    pattern = raw.integer("sliding_window_pattern", 6)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(sizes.layers)]
    types, windows = read_windows(raw, raw.optional_integer("sliding_window", 4096), default)
    rotaries = read_rotary_by_type(
        raw,
        sizes.head_dim,
        sizes.positions,
        {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)},
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "gemma3_text",
        sizes,
        [rotaries[FULL], rotaries[SLIDING]],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        ties=True,
        end=(1,),
        norm_plus_one=True,
        norms=NORMS_AROUND,
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        activation=read_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        rotary_of_layer=tuple((FULL, SLIDING).index(one) for one in types),
        window_of_layer=windows,
        attention_scale=raw.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=raw.optional_number("attn_logit_softcapping"),
        logit_soft_cap=raw.optional_number("final_logit_softcapping"),
        embedding_factor=sizes.hidden**0.5,
    )


def _sizes(raw: HFConfig, *, vocab: int, positions: int) -> Sizes:
    return Sizes.read(
        raw, layers=26, hidden=2304, heads=8, kv_heads=4, head_dim=256, ffn=9216, vocab=vocab,
        positions=positions,
    )  # fmt: skip


def _refuse_bidirectional(raw: HFConfig) -> None:
    if raw.boolean("use_bidirectional_attention", False):
        raise raw.error("use_bidirectional_attention", "false: only causal models are served")
