"""OLMo 1 to 3 (Groeneveld et al. 2024) and EXAONE 4: from the second on, norms after the blocks."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    NORMS_AFTER,
    SLIDING,
    DecoderConfig,
    Sizes,
    read_windows,
)
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields
from fastserve_backend.checkpoints.rotary_config import read_rotary_by_type


def read_olmo(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """LLaMA with layer norms without weights."""
    sizes = _sizes(raw)
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "olmo",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=1e-5,
        end=(50279,),
        norm="layer",
        norm_has_weight=False,
        qkv_bias=has_bias,
        out_bias=has_bias,
        clip_qkv=raw.optional_number("clip_qkv"),
    )


def read_olmo2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = _sizes(raw)
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "olmo2",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(50279,),
        norms=NORMS_AFTER,
        qk_norm="all_heads",
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def read_olmo3(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """OLMo 2 with windows in three of four layers. Only the others scale their rotation."""
    sizes = _sizes(raw)
    default = [SLIDING if (layer + 1) % 4 else FULL for layer in range(sizes.layers)]
    types, windows = read_windows(raw, raw.optional_integer("sliding_window", 4096), default)
    theta = "rope_theta", 5e5
    rotaries = read_rotary_by_type(
        raw, sizes.head_dim, sizes.positions, {FULL: theta, SLIDING: theta}
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "olmo3",
        sizes,
        [rotaries[FULL], rotaries[SLIDING]],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(50279,),
        norms=NORMS_AFTER,
        qk_norm="all_heads",
        qkv_bias=has_bias,
        out_bias=has_bias,
        rotary_of_layer=tuple((FULL, SLIDING).index(one) for one in types),
        window_of_layer=windows,
    )


def read_exaone4(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """OLMo 2 with norms of each head."""
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=102400,
        positions=2048,
    )  # fmt: skip
    windows, rotations = read_exaone_layers(raw, sizes)
    return DecoderConfig.read(
        raw,
        common,
        "exaone4",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        norms=NORMS_AFTER,
        qk_norm="head",
        rotary_of_layer=rotations,
        window_of_layer=windows,
    )


def read_exaone_layers(
    raw: HFConfig, sizes: Sizes
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The layers' windows and rotations. If some layers have a window, the others do not rotate."""
    window = raw.optional_integer("sliding_window", 4096)
    pattern = 1 if window is None else raw.period("sliding_window_pattern", 4)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(sizes.layers)]
    _, windows = read_windows(raw, window, default)
    rotations = tuple(0 if window is None or one is not None else None for one in windows)
    return windows, rotations


def _sizes(raw: HFConfig) -> Sizes:
    return Sizes.read(raw, layers=32, hidden=4096, heads=32, ffn=11008, vocab=50304, positions=2048)
