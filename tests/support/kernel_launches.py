"""Launches for `ahead_of_time`: each calls a launcher as a model step or a swap does."""

from __future__ import annotations

import torch
from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.gpu import (
    activations,
    cache_writes,
    grouped_quantized_linear,
    int8_linear,
    kv_int8,
    norms,
    packed_weight,
    paged_decode,
    paged_prefill,
    pinned_copies,
    quantized_linear,
    routing,
    sums,
    token_choice,
)
from fastserve_kernels.gpu import (
    grouped_linear as grouped,
)
from fastserve_kernels.int8_cache import SCALE_BYTES
from fastserve_kernels.routes import Routes
from torch import Tensor

TOKENS, LAYERS, BLOCKS, BLOCK_SIZE = 256, 40, 4000, 16
JOBS, ITEMS, TABLE_ENTRIES = 16, 64, 2048
"""Sizes of attention: jobs, items of work lists, and blocks of all jobs."""


def bias_relu(dtype: torch.dtype, size: int) -> None:
    activations.bias_relu(_empty(dtype, TOKENS, size), _empty(dtype, size))


def silu_mul(dtype: torch.dtype, size: int) -> None:
    activations.silu_mul(_empty(dtype, TOKENS, 2 * size))


def gelu_tanh_mul(dtype: torch.dtype, size: int) -> None:
    activations.gelu_tanh_mul(_empty(dtype, TOKENS, 2 * size))


def add_layer_norm(dtype: torch.dtype, size: int) -> None:
    x = _empty(dtype, TOKENS, size)
    norms.add_layer_norm(x, x, _empty(dtype, size), _empty(dtype, size), 1e-5)


def add_rms_norm(dtype: torch.dtype, size: int) -> None:
    x = _empty(dtype, TOKENS, size)
    norms.add_rms_norm(x, x, _empty(dtype, size), 1e-5, 0.0)


def rms_norm_heads(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    query, _, _ = _qkv(dtype, heads, kv_heads, head_dim)
    norms.rms_norm_heads(query, _empty(dtype, head_dim), 1e-5, 0.0)


def kv_write(dtype: torch.dtype, kv_heads: int, head_dim: int, int8: bool = False) -> None:
    _, key, value = _qkv(dtype, kv_heads, kv_heads, head_dim)
    cache_writes.kv_write(_cache(dtype, kv_heads, head_dim, int8), 3, key, value, _slots())


def rope_kv_write(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int,
    int8: bool = False,
) -> None:  # fmt: skip
    cos_sin = _empty(torch.float32, TOKENS, rotary_dim)
    cache = _cache(dtype, kv_heads, head_dim, int8)
    cache_writes.rope_kv_write(*_qkv(dtype, heads, kv_heads, head_dim), cos_sin, cache, 3, _slots())


def quantize_blocks(dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    kv_int8.quantize_blocks(_cache(dtype, kv_heads, head_dim), _integers(8), BLOCK_SIZE)


def dequantize_blocks(dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    shape = (8, LAYERS, 2, kv_heads, BLOCK_SIZE, head_dim)
    codes = _empty(torch.int8, *shape)
    parameters = _empty(torch.float16, *shape[:4], 2, head_dim)
    cache = _cache(dtype, kv_heads, head_dim)
    kv_int8.dequantize_blocks(codes, parameters, cache, _integers(8))


def copy_words() -> None:
    pinned_copies.copy_words(_empty(torch.int64, 1001), _empty(torch.int64, 1001))


def linear(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> None:
    int8_linear.int8_linear(
        _empty(dtype, rows, in_features),
        _empty(torch.int8, out_features, in_features),
        _empty(dtype, out_features),
        _empty(dtype, out_features),
        relu=True,
    )


# Layouts of weights of few bits, and whether their numbers are float32 scales and offsets, pairs
# of both in float16, or scales alone.
PACKED = {
    "Q4_1": (packed_weight.Layout(4, False, False, 32, 0), "pairs"),
    "INT4": (packed_weight.Layout(4, False, False, 128, 0), "pairs"),
    "Q4_0": (packed_weight.Layout(4, False, False, 32, 8), "scales"),
    "Q4_K": (packed_weight.Layout(4, False, False, 32, 0), "both"),
    "Q6_K": (packed_weight.Layout(8, False, False, 16, 32), "scales"),
    "Q8_0": (packed_weight.Layout(8, False, True, 32, 128), "scales"),
    "FP8": (packed_weight.Layout(8, True, False, 128, 0), "scales"),
}


def _packed(packing: str, out_features: int, in_features: int) -> packed_weight.PackedWeight:
    layout, numbers = PACKED[packing]
    columns = -(-in_features // packed_weight.COLUMNS_MULTIPLE) * packed_weight.COLUMNS_MULTIPLE
    shape = (columns // layout.group, out_features)
    return packed_weight.PackedWeight(
        layout,
        _empty(torch.int16, out_features, columns * layout.bits // 16),
        _empty(torch.int32 if numbers == "pairs" else torch.float32, *shape),
        _empty(torch.float32, *shape) if numbers == "both" else None,
        out_features,
        in_features,
    )


def quantized(
    dtype: torch.dtype, packing: str, rows: int, out_features: int, in_features: int
) -> None:
    quantized_linear.quantized_linear(
        _empty(dtype, rows, in_features),
        _packed(packing, out_features, in_features),
        _empty(dtype, out_features),
        True,
        _empty(dtype, rows, out_features),
    )


def dequantize_rows(
    dtype: torch.dtype, packing: str, out_features: int, in_features: int, by_ids: bool
) -> None:
    rows = _empty(torch.int64, TOKENS) if by_ids else slice(0, TOKENS)
    _packed(packing, out_features, in_features).dequantized(dtype, rows)


def grouped_linear(
    dtype: torch.dtype, rows: int, groups: int, out_features: int, in_features: int,
    int8: bool = False,
) -> None:  # fmt: skip
    grouped.grouped_linear(
        _empty(dtype, rows, in_features),
        _integers(groups + 1),
        _integers(rows),
        _empty(torch.int8 if int8 else dtype, groups, out_features, in_features),
        _empty(dtype, groups, out_features) if int8 else None,
        _empty(dtype, groups, out_features),
    )


def grouped_quantized(
    dtype: torch.dtype, packing: str, rows: int, groups: int, out_features: int, in_features: int
) -> None:
    grouped_quantized_linear.grouped_quantized_linear(
        _empty(dtype, rows, in_features),
        _integers(groups + 1),
        _integers(rows),
        _packed(packing, groups * out_features, in_features),
        _empty(dtype, groups, out_features),
        groups,
    )


def clamped_swiglu(dtype: torch.dtype, size: int) -> None:
    activations.clamped_swiglu(_empty(dtype, TOKENS, 2 * size), 1.702, 7.0)


def sort_choices(experts: int) -> None:
    routing.sort_choices(_empty(torch.int64, TOKENS, 8), 0, experts)


def sum_choices(dtype: torch.dtype, size: int) -> None:
    choices, experts = 8, 64
    routes = Routes(_integers(TOKENS * choices), _integers(experts + 1), _integers(TOKENS, choices))
    weights = _empty(torch.float32, TOKENS, choices)
    sums.sum_choices(_empty(dtype, TOKENS * choices, size), weights, routes)


def decode(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, num_decodes: int = JOBS,
    table_entries: int = TABLE_ENTRIES, items: int = ITEMS, int8: bool = False, window: int = 0,
    capped: bool = False, sinks: bool = False, writes: bool = False,
) -> None:  # fmt: skip
    """writes: it also writes the rows' tokens to the cache."""
    n = num_decodes
    query, key, value = _qkv(dtype, heads, kv_heads, head_dim)
    paged_decode.paged_decode(
        query[:n], _cache(dtype, kv_heads, head_dim, int8), 3, _integers(table_entries),
        _integers(JOBS), _integers(n), _integers(1 + n + 2 * items),
        _rule(heads, head_dim, window, capped, sinks),
        _empty(dtype, TOKENS, heads, head_dim)[:n],
        paged_decode.decode_scratch(ITEMS, heads, head_dim, query.device),
        (key[:n], value[:n]) if writes else None,
    )  # fmt: skip


def prefill(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int,
    table_entries: int = TABLE_ENTRIES, items: int = ITEMS, int8: bool = False, window: int = 0,
    capped: bool = False, sinks: bool = False,
) -> None:  # fmt: skip
    query, _, _ = _qkv(dtype, heads, kv_heads, head_dim)
    paged_prefill.paged_prefill(
        query, _cache(dtype, kv_heads, head_dim, int8), 3, _integers(table_entries),
        _integers(JOBS), _integers(JOBS), _integers(JOBS + 1), _integers(1 + 2 * items),
        _rule(heads, head_dim, window, capped, sinks), _empty(dtype, TOKENS, heads, head_dim),
    )  # fmt: skip


def step(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_decodes: int,
    table_entries: int,
) -> None:
    """Decodes, and prompts in the same tensors."""
    decode(dtype, heads, kv_heads, head_dim, num_decodes, table_entries, items=num_decodes + 1)
    prefill(dtype, heads, kv_heads, head_dim, table_entries, items=num_decodes + 1)


def choose_tokens(dtype: torch.dtype, vocab: int, rows: int = JOBS) -> None:
    rules = _empty(torch.int64, rows, token_choice.RULE_WORDS)
    token_choice.choose_tokens(_empty(dtype, rows, vocab), rules, filters=True, no_token=-1)


def _rule(heads: int, head_dim: int, window: int, capped: bool, sinks: bool) -> AttentionRule:
    return AttentionRule(
        head_dim**-0.5,
        window or None,
        50.0 if capped else None,
        _empty(torch.float32, heads) if sinks else None,
    )


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _integers(*shape: int) -> Tensor:
    return _empty(torch.int32, *shape)


def _qkv(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one fused projection."""
    fused = _empty(dtype, TOKENS, heads + 2 * kv_heads, head_dim)
    return fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]


def _cache(dtype: torch.dtype, kv_heads: int, head_dim: int, int8: bool = False) -> Tensor:
    """If ``int8``, the cache is as in `int8_cache`, for a model of `dtype`."""
    if int8:
        width = head_dim + SCALE_BYTES
        return _empty(torch.int8, BLOCKS, LAYERS, 2, kv_heads, BLOCK_SIZE, width)
    return _empty(dtype, BLOCKS, LAYERS, 2, kv_heads, BLOCK_SIZE, head_dim)


def _slots() -> Tensor:
    return _empty(torch.int64, TOKENS)
