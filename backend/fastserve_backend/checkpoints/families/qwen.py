"""Qwen 2 and 2.5 (LLaMA with biases on query, key and value), Qwen 3 (with norms of both), and the
text models of Qwen-VL, which have other defaults."""

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
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields
from fastserve_backend.checkpoints.rotary_config import Rotary

QWEN2: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-0.5b": published(
            "qwen2", 24, 14, 2, 896, 4864, 32768, rope_theta=1e6, tie_word_embeddings=True
        )
    }
)
QWEN3: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"qwen3-8b": published("qwen3", 36, 32, 8, 4096, 12288, 40960, rope_theta=1e6)}
)


def asked_window(raw: HFConfig) -> int | None:
    """The window of Qwen's layers with windows, which are off unless asked for."""
    is_asked = raw.boolean("use_sliding_window", False)
    return raw.optional_integer("sliding_window", 4096) if is_asked else None


def _windows(raw: HFConfig, num_layers: int, first: int = 28) -> tuple[int | None, ...]:
    """Windows are for the layers from ``max_window_layers`` on; its default is ``first``."""
    window = asked_window(raw)
    first = num_layers if window is None else raw.integer("max_window_layers", first)
    default = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return read_windows(raw, window, default)[1]


def read_qwen2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=32, ffn=22016, vocab=151936,
        positions=32768,
    )  # fmt: skip
    windows = _windows(raw, sizes.layers)
    return _qwen2(raw, common, sizes, whole_rotary(raw, sizes), windows, norm_eps=1e-6, end=())


def read_qwen2_vl(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=80, hidden=8192, heads=64, kv_heads=8, ffn=29568, vocab=152064,
        positions=32768,
    )  # fmt: skip
    rotary, windows = whole_rotary(raw, sizes, theta=1e6), _windows(raw, sizes.layers, 80)
    return _qwen2(raw, common, sizes, rotary, windows, norm_eps=1e-5, end=(151645,))


def _qwen2(
    raw: HFConfig,
    common: CommonFields,
    sizes: Sizes,
    rotary: Rotary,
    windows: tuple[int | None, ...],
    *,
    norm_eps: float,
    end: tuple[int, ...],
) -> DecoderConfig:
    return DecoderConfig.read(
        raw,
        common,
        "qwen2",
        sizes,
        [rotary],
        norm_eps=raw.number("rms_norm_eps", norm_eps),
        end=end,
        qkv_bias=True,
        window_of_layer=windows,
    )


def read_qwen3(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=22016, vocab=151936,
        positions=32768,
    )  # fmt: skip
    windows = _windows(raw, sizes.layers)
    return _qwen3(raw, common, sizes, whole_rotary(raw, sizes), windows)


def read_qwen3_vl(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=22016, vocab=151936,
        positions=128000,
    )  # fmt: skip
    return _qwen3(raw, common, sizes, whole_rotary(raw, sizes, theta=5e5), ())


def _qwen3(
    raw: HFConfig,
    common: CommonFields,
    sizes: Sizes,
    rotary: Rotary,
    windows: tuple[int | None, ...],
) -> DecoderConfig:
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "qwen3",
        sizes,
        [rotary],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        end=(),
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        window_of_layer=windows,
    )
