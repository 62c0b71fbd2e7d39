"""Phi-3, 3.5 and 4 (Abdin et al. 2024): LLaMA with fused projections and LongRoPE."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    Sizes,
)
from fastserve_backend.checkpoints.families.rotation import partial_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields


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
