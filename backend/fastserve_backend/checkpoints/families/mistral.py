"""Mistral (Jiang et al. 2023) and Ministral: LLaMA with sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    Sizes,
    read_windows,
)
from fastserve_backend.checkpoints.families.published import published
from fastserve_backend.checkpoints.families.rotation import whole_rotary, with_default_rope
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields

MISTRAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"mistral-7b": published("mistral", 32, 32, 8, 4096, 14336, 32768)}  # version 0.1
)
_MINISTRAL3_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)


def read_mistral(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = _sizes(raw)
    window = raw.optional_integer("sliding_window", 4096)
    return DecoderConfig.read(
        raw,
        common,
        "mistral",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        window_of_layer=(window,) * sizes.layers,
    )


def read_ministral(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Mistral whose layers may differ."""
    sizes = _sizes(raw)
    window = raw.optional_integer("sliding_window", 4096)
    default = FULL if window is None else SLIDING
    _, windows = read_windows(raw, window, [default] * sizes.layers)
    return DecoderConfig.read(
        raw,
        common,
        "ministral",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        window_of_layer=windows,
    )


def read_ministral3(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Mistral whose queries grow with their position."""
    sizes = Sizes.read(
        raw, layers=34, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=131072,
        positions=262144,
    )  # fmt: skip
    raw = with_default_rope(raw, _MINISTRAL3_ROPE)
    return DecoderConfig.read(
        raw,
        common,
        "ministral3",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        window_of_layer=(raw.optional_integer("sliding_window"),) * sizes.layers,
    )


def _sizes(raw: HFConfig) -> Sizes:
    return Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000,
        positions=131072,
    )  # fmt: skip
