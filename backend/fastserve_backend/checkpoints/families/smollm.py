"""SmolLM3 (Hugging Face 2025): LLaMA in which every fourth layer has no rotation."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    Sizes,
    read_windows,
)
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields


def read_smollm3(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=36, hidden=2048, heads=16, kv_heads=4, ffn=11008, vocab=128256,
        positions=32768,
    )  # fmt: skip
    interval = raw.integer("no_rope_layer_interval", 4)
    every_other = tuple(int((layer + 1) % interval != 0) for layer in range(sizes.layers))
    rotates = raw.flags("no_rope_layers", every_other)  # 1: the layer *has* a rotation
    window = raw.optional_integer("sliding_window")
    if not raw.boolean("use_sliding_window", False):
        window = None
    default = [FULL if window is None or rotated else SLIDING for rotated in rotates]
    types, _ = read_windows(raw, window or 1, default)
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "smollm3",
        sizes,
        [whole_rotary(raw, sizes, theta=2e6)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        ties=True,
        end=(128001,),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=raw.boolean("mlp_bias", False),
        rotary_of_layer=tuple(0 if rotated else None for rotated in rotates),
        window_of_layer=tuple(window if one == SLIDING else None for one in types),
    )
