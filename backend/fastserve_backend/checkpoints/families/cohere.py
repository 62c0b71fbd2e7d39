"""Command R to A (Cohere 2024): attention and feed-forward side by side behind one norm."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    NormNames,
    Sizes,
    read_activation,
    read_windows,
)
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields


def read_cohere(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    if raw.boolean("use_qk_norm", False):
        raise raw.error("use_qk_norm", "false: norms of queries and keys are not supported here")
    sizes = _sizes(raw)
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "cohere",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        ties=True,
        end=(255001,),
        norm="layer",
        norms=NormNames(feed_forward_in=None),
        qkv_bias=has_bias,
        out_bias=has_bias,
        activation=read_activation(raw, "hidden_act", "silu"),
        is_parallel=True,
        rotates_neighbours=True,
        logit_factor=raw.number("logit_scale", 0.0625),
    )


def read_cohere2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Only layers with a window rotate."""
    sizes = _sizes(raw)
    pattern = raw.integer("sliding_window_pattern", 4)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(sizes.layers)]
    _, windows = read_windows(raw, raw.optional_integer("sliding_window", 4096), default)
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "cohere2",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        ties=True,
        end=(255001,),
        norm="layer",
        norms=NormNames(feed_forward_in=None),
        qkv_bias=has_bias,
        out_bias=has_bias,
        activation=read_activation(raw, "hidden_act", "silu"),
        is_parallel=True,
        rotates_neighbours=True,
        rotary_of_layer=tuple(None if window is None else 0 for window in windows),
        window_of_layer=windows,
        logit_factor=raw.number("logit_scale", 0.0625),
    )


def _sizes(raw: HFConfig) -> Sizes:
    return Sizes.read(
        raw, layers=40, hidden=8192, heads=64, ffn=22528, vocab=256000, positions=8192
    )
