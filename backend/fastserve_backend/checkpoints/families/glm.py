"""GLM-4 (Zeng et al. 2024): neighbouring elements of half a head are rotated."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    NormNames,
    Sizes,
)
from fastserve_backend.checkpoints.families.rotation import partial_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields


def read_glm(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    return _read(raw, common, "glm", NormNames())


def read_glm4(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """GLM with norms after its blocks, too."""
    norms = NormNames(
        attention_out="post_self_attn_layernorm", feed_forward_out="post_mlp_layernorm"
    )
    return _read(raw, common, "glm4", norms)


def _read(raw: HFConfig, common: CommonFields, name: str, norms: NormNames) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=40, hidden=4096, heads=32, kv_heads=2, head_dim=128, ffn=13696, vocab=151552,
        positions=131072,
    )  # fmt: skip
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [partial_rotary(raw, sizes, share=0.5)],
        norm_eps=raw.number("rms_norm_eps", 1.5625e-7),
        end=(151329, 151336, 151338),
        norms=norms,
        qkv_bias=raw.boolean("attention_bias", True),
        rotates_neighbours=True,
    )
