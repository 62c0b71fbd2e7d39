"""Decoders with layer norms: StarCoder2 (Lozhkov et al. 2024), Nemotron 4, StableLM 2, Jais 2
and Persimmon."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    Sizes,
    read_activation,
)
from fastserve_backend.checkpoints.families.rotation import partial_rotary, whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields

_PERSIMMON_LAYER = (
    ("self_attn.query_key_value", "self_attn.qkv_proj"),
    ("self_attn.dense", "self_attn.o_proj"),
    ("self_attn.q_layernorm", "self_attn.q_norm"),
    ("self_attn.k_layernorm", "self_attn.k_norm"),
)


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


def read_nemotron(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=6144, heads=48, ffn=24576, vocab=256000, positions=4096
    )
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "nemotron",
        sizes,
        [partial_rotary(raw, sizes, share=0.5)],
        norm_eps=raw.number("norm_eps", 1e-5),
        end=(3,),
        norm="layer",
        norm_plus_one=True,
        norm_has_bias=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=raw.boolean("mlp_bias", False),
        mlp=("up_proj", "down_proj"),
        activation=read_activation(raw, "hidden_act", "relu2"),
    )


def read_jais2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=32, hidden=3328, heads=26, ffn=26624, vocab=150272, positions=8192
    )
    has_bias = raw.boolean("attention_bias", True)
    return DecoderConfig.read(
        raw,
        common,
        "jais2",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        end=(150024,),
        norm="layer",
        norm_has_bias=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=raw.boolean("mlp_bias", True),
        mlp=("up_proj", "down_proj"),
        activation=read_activation(raw, "hidden_act", "relu2"),
    )


def read_stablelm(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    for switch in ("qk_layernorm", "use_parallel_residual"):
        if raw.boolean(switch, False):
            raise raw.error(switch, "false: the 12B model of this family is not supported")
    sizes = Sizes.read(
        raw, layers=32, hidden=2560, heads=32, kv_heads=32, ffn=6912, vocab=50304, positions=4096
    )
    return DecoderConfig.read(
        raw,
        common,
        "stablelm",
        sizes,
        [partial_rotary(raw, sizes, share=0.25)],
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        end=(0,),
        norm="layer",
        norm_has_bias=True,
        qkv_bias=raw.boolean("use_qkv_bias", False),
    )


def read_persimmon(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    raw = raw.with_value("num_key_value_heads", None).without("head_dim")
    sizes = Sizes.read(
        raw, layers=36, hidden=4096, heads=64, ffn=16384, vocab=262144, positions=16384
    )
    return DecoderConfig.read(
        raw,
        common,
        "persimmon",
        sizes,
        [partial_rotary(raw, sizes, share=0.5)],
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        norm="layer",
        norm_has_bias=True,
        qk_norm="layer" if raw.boolean("qk_layernorm", True) else None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        mlp=("dense_h_to_4h", "dense_4h_to_h"),
        activation=read_activation(raw, "hidden_act", "relu2"),
        module_names=(("final_layernorm", "norm"),),
        layer_names=_PERSIMMON_LAYER,
        fused_qkv="by_kv_head",
    )
