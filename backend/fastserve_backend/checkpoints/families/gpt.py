"""The families of GPT-2 (Radford et al. 2019): GPT-2, StarCoder 1 and SantaCoder, which add an
embedding of each position, and GPT-J and CodeGen, which rotate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    FusedQKV,
    Names,
    NormNames,
    Sizes,
    read_activation,
)
from fastserve_backend.checkpoints.families.rotation import partial_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields

_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
)
_MODULES = (("wte", "embed_tokens"), ("wpe", "embed_positions"), ("h", "layers"), ("ln_f", "norm"))
_LAYER = (("attn.c_attn", "self_attn.qkv_proj"), ("attn.c_proj", "self_attn.o_proj"))


def read_gpt2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    if raw.boolean("scale_attn_by_inverse_layer_idx", False):
        raise raw.error("scale_attn_by_inverse_layer_idx", "false")
    return _with_positions(raw, common, "gpt2", "gelu_new", is_transposed=True)


def read_gpt_bigcode(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """GPT-2 with one head of keys and values (Li et al. 2023)."""
    is_multi_query = raw.boolean("multi_query", True)
    return _with_positions(
        raw,
        common,
        "gpt_bigcode",
        "gelu_pytorch_tanh",
        kv_heads=1 if is_multi_query else None,
        fused_qkv="parts" if is_multi_query else "by_kv_head",
    )


def read_gptj(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    names = (("attn.out_proj", "self_attn.o_proj"), ("attn", "self_attn"))
    return _with_rotation(raw, common, "gptj", names, "parts")


def read_codegen(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """GPT-J with one matrix for query, key and value (Nijkamp et al. 2022)."""
    names = (("attn.out_proj", "self_attn.o_proj"), ("attn.qkv_proj", "self_attn.qkv_proj"))
    return _with_rotation(raw, common, "codegen", names, "in_quarters")


def _with_positions(
    raw: HFConfig,
    common: CommonFields,
    name: str,
    activation: str,
    *,
    kv_heads: int | None = None,
    fused_qkv: FusedQKV = "parts",
    is_transposed: bool = False,
) -> DecoderConfig:
    if raw.boolean("add_cross_attention", False):
        raise raw.error("add_cross_attention", "false")
    sizes = _sizes(
        raw, layers=12, hidden=768, heads=12, vocab=50257, positions=1024, kv_heads=kv_heads
    )
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [],
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        ties=True,
        end=(50256,),
        norm="layer",
        norm_has_bias=True,
        norms=NormNames(attention_in="ln_1", feed_forward_in="ln_2"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        mlp=("c_fc", "c_proj"),
        activation=read_activation(raw, "activation_function", activation),
        rotary_of_layer=(None,) * sizes.layers,
        attention_scale=None if raw.boolean("scale_attn_weights", True) else 1.0,
        table_positions=sizes.positions,
        module_names=_MODULES,
        layer_names=_LAYER,
        fused_qkv=fused_qkv,
        has_transposed_layers=is_transposed,
    )


def _with_rotation(
    raw: HFConfig, common: CommonFields, name: str, layer_names: Names, fused_qkv: FusedQKV
) -> DecoderConfig:
    """Attention and feed-forward side by side behind one norm."""
    sizes = _sizes(raw, layers=28, hidden=4096, heads=16, vocab=50400, positions=2048)
    if fused_qkv == "in_quarters" and sizes.heads % 4:
        raise raw.error("num_attention_heads", "a multiple of 4")
    # transformers computes their rotation from ``rotary_dim`` and no other field.
    rotated = raw.integer("rotary_dim", 64)
    raw = raw.without("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    return DecoderConfig.read(
        raw,
        common,
        name,
        sizes,
        [partial_rotary(raw, sizes, share=rotated / sizes.head_dim)],
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        end=(50256,),
        norm="layer",
        norm_has_bias=True,
        norms=NormNames(attention_in="ln_1", feed_forward_in=None),
        mlp_bias=True,
        mlp=("fc_in", "fc_out"),
        activation=read_activation(raw, "activation_function", "gelu_new"),
        is_parallel=True,
        rotates_neighbours=True,
        head_bias=True,
        module_names=_MODULES,
        layer_names=layer_names,
        fused_qkv=fused_qkv,
    )


def _sizes(
    raw: HFConfig,
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    positions: int,
    kv_heads: int | None = None,
) -> Sizes:
    """The arguments are the family's defaults, except the number of KV heads; None: as many as
    heads. Heads share the hidden size, and the feed-forward is four times as wide by default."""
    raw = raw.renamed(_FIELDS)
    ffn = raw.optional_integer("n_inner") or 4 * raw.integer("hidden_size", hidden)
    raw = raw.with_value("num_key_value_heads", kv_heads).with_value("intermediate_size", ffn)
    return Sizes.read(
        raw.without("head_dim"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        vocab=vocab,
        positions=positions,
    )
