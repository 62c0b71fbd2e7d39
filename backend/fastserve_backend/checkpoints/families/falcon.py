"""Falcon (Almazrouei et al. 2023)."""

from __future__ import annotations

from typing import Unpack

from fastserve_backend.checkpoints.decoder_config import (
    DecoderConfig,
    NormNames,
    Sizes,
    read_activation,
)
from fastserve_backend.checkpoints.families.rotation import whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields

_MODULES = (("word_embeddings", "embed_tokens"), ("h", "layers"), ("ln_f", "norm"))
_LAYER = (
    ("self_attention.query_key_value", "self_attn.qkv_proj"),
    ("self_attention.dense", "self_attn.o_proj"),
)


def read_falcon(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """The 7B has one head of keys and values, the "new" ones (11B, 40B, 180B) have groups."""
    if raw.boolean("alibi", False):
        raise raw.error("alibi", "false: scores with a bias for distances are not supported")
    is_new = raw.boolean("new_decoder_architecture", False)
    is_multi_query = not is_new and raw.boolean("multi_query", True)
    is_parallel = is_new or raw.boolean("parallel_attn", True)
    if is_new and not raw.boolean("parallel_attn", True):
        raise raw.error("parallel_attn", "true, as in all models of the new architecture")
    heads = raw.integer("num_attention_heads", 71)
    kv_heads = raw.optional_integer("num_kv_heads") or heads
    if not is_new:
        kv_heads = 1 if is_multi_query else heads
    elif heads % kv_heads:
        raise raw.error("num_kv_heads", f"a divisor of the {heads} heads")
    raw = raw.renamed({"n_embed": "hidden_size"})
    ffn = raw.optional_integer("ffn_hidden_size") or 4 * raw.integer("hidden_size", 4544)
    fields = raw.without("head_dim").with_value("intermediate_size", ffn)
    sizes = Sizes.read(
        fields.with_value("num_key_value_heads", kv_heads),
        layers=32,
        hidden=4544,
        heads=71,
        ffn=ffn,
        vocab=65024,
        positions=2048,
    )
    has_bias = raw.boolean("bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "falcon",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        ties=True,
        end=(11,),
        norm="layer",
        norm_has_bias=True,
        norms=_norms(raw, is_new=is_new, is_parallel=is_parallel),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        mlp=("dense_h_to_4h", "dense_4h_to_h"),
        activation=read_activation(raw, "activation", "gelu"),
        is_parallel=is_parallel,
        module_names=_MODULES,
        layer_names=_LAYER,
        fused_qkv="parts" if is_multi_query else "by_kv_head",
    )


def _norms(raw: HFConfig, *, is_new: bool, is_parallel: bool) -> NormNames:
    if not is_parallel:
        return NormNames()
    count = raw.optional_integer("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if is_new and count == 2:
        return NormNames(attention_in="ln_attn", feed_forward_in="ln_mlp")
    if count == 1:
        return NormNames(feed_forward_in=None)
    raise raw.error("num_ln_in_parallel_attn", "1, or 2 of a model of the new architecture")
