"""StarCoder2 (Lozhkov et al. 2024): layer norms, biases everywhere, a feed-forward without gate."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    Sizes,
    read_activation,
)
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields


def read_starcoder2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=30, hidden=3072, heads=24, kv_heads=2, ffn=12288, vocab=49152, positions=4096
    )
    has_bias = raw.boolean("use_bias", True)
    return DecoderConfig.read(
        raw,
        common,
        "starcoder2",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("norm_epsilon", 1e-5),
        ties=True,
        end=(50256,),
        norm="layer",
        norm_has_bias=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        mlp=("c_fc", "c_proj"),
        activation=read_activation(raw, "hidden_act", "gelu_pytorch_tanh"),
        window_of_layer=(raw.optional_integer("sliding_window"),) * sizes.layers,
    )
