"""Granite 3 (IBM 2024): LLaMA with factors for embeddings, residuals, scores and logits."""

from __future__ import annotations

from typing import Unpack

from fastserve_kernels.routing_rule import RoutingRule

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    Sizes,
)
from fastserve_backend.checkpoints.experts_config import ExpertsConfig, read_choices
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields


def read_granite(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    return _read(raw, common, "granite", None)


def read_granitemoe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """Granite 3's mixtures, perhaps with an expert that computes all tokens."""
    raw.choice("hidden_act", "silu", ("silu",))
    count, top_k = read_choices(raw, "num_local_experts", 8, 2)
    experts = ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=raw.integer("intermediate_size", 11008),
        routing=RoutingRule(),
        shared_size=raw.whole_number("shared_intermediate_size", 0),
    )
    return _read(raw, common, "granitemoe", experts)


def _read(
    raw: HFConfig, common: CommonFields, name: str, experts: ExpertsConfig | None
) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, positions=2048
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=raw.boolean("mlp_bias", False),
        attention_scale=raw.number("attention_multiplier", 1.0),
        embedding_factor=raw.number("embedding_multiplier", 1.0),
        residual_factor=raw.number("residual_multiplier", 1.0),
        logit_factor=1 / raw.number("logits_scaling", 1.0),
        experts=experts,
    )
