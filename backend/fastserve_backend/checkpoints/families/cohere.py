"""Command R to A (Cohere 2024): attention and feed-forward side by side behind one norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    NormNames,
    Sizes,
    read_windows,
)
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields

_NUM_LAYERS = 40  # unless config.json says otherwise


def read_cohere(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Command R+ also has norms of queries and keys."""
    config = _read(raw, common, "cohere", theta=5e5)
    return replace(config, qk_norm="layer_by_head") if raw.boolean("use_qk_norm", False) else config


def read_cohere2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Only layers with a window rotate."""
    pattern = raw.integer("sliding_window_pattern", 4)
    num_layers = raw.integer("num_hidden_layers", _NUM_LAYERS)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    _, windows = read_windows(raw, raw.optional_integer("sliding_window", 4096), default)
    return _read(
        raw,
        common,
        "cohere2",
        rotary_of_layer=tuple(None if window is None else 0 for window in windows),
        window_of_layer=windows,
    )


def _read(
    raw: HFConfig,
    common: CommonFields,
    name: str,
    *,
    theta: float = 1e4,
    rotary_of_layer: tuple[int | None, ...] = (),
    window_of_layer: tuple[int | None, ...] = (),
) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=_NUM_LAYERS, hidden=8192, heads=64, ffn=22528, vocab=256000, positions=8192
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [whole_rotary(raw, sizes, theta=theta)],
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        ties=True,
        end=(255001,),
        norm="layer",
        norms=NormNames(feed_forward_in=None),
        qkv_bias=has_bias,
        out_bias=has_bias,
        is_parallel=True,
        rotates_neighbours=True,
        rotary_of_layer=rotary_of_layer,
        window_of_layer=window_of_layer,
        logit_factor=raw.number("logit_scale", 0.0625),
    )
