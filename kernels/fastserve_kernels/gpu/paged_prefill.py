"""Causal attention of whole prompts and of chunks of prompts over the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.device import capability
from fastserve_kernels.gpu.paged_cache import (
    NO_SCORE,
    first_visible,
    load_tokens,
    rule_arguments,
    share_beside_sinks,
    tanh_of,
    token_offsets,
)
from fastserve_kernels.gpu.work_lists import prefill_capacity
from fastserve_kernels.int8_cache import is_int8, token_width


def query_tile(head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a tile of `paged_prefill`, as `work_lists.prefill_work` needs them.

    head_dim: the larger one of keys' and values'.
    dtype: that of queries.
    """
    parameters = launch_parameters.prefill(head_dim, dtype.itemsize, capability(device), int8=False)
    return parameters.query_tile


def paged_prefill(
    query: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    table_starts: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    work: Tensor,
    rule: AttentionRule,
    out: Tensor,
) -> None:
    """Causal attention of the rows of S jobs, whose K and V are already in the cache.

    The rows query_starts[j] to query_starts[j + 1] are the last ones of job j's context_lens[j]
    tokens. Each attends to all tokens up to itself, or to those of them within the rule's window.

    query: [T, heads, key_dim] of the model's dtype; only the last dimension must be contiguous.
        heads is a multiple of kv_heads.
    kv: see `fastserve_kernels.ops`; block_size is a power of two.
    block_tables, table_starts: [N] and [S], see `fastserve_kernels.ops`.
    context_lens: int32 [S]. query_starts: int32 [S + 1].
    work: from `work_lists.prefill_work`, with tiles of `query_tile` rows.
    rule: its sinks are on the device.
    out: [T, heads, value_dim] of query's dtype; only the last dimension must be contiguous. Rows
        that belong to no job are not written.

    A row's result does not depend on other jobs.
    Grid: (capacity of work * heads,), whatever the tensors' content. A program has a tile of rows
    of one head, or nothing to do. The heads of a tile are neighbours, and among them those that
    share K and V.
    """
    heads, key_dim = query.shape[1:]
    value_dim = out.shape[2]
    kv_heads, block_size = kv.shape[3:5]
    capacity = prefill_capacity(work.numel())
    if not capacity:
        return
    parameters = launch_parameters.prefill(
        max(key_dim, value_dim), query.element_size(), capability(query.device), is_int8(kv)
    )
    _attend_tiles[(capacity * heads,)](
        query, kv, block_tables, table_starts, context_lens, query_starts, work, out,
        layer, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        kv.stride(1), **rule_arguments(rule),
        HEADS=heads, KV_HEADS=kv_heads,
        KEY_DIM=key_dim, PADDED_KEY_DIM=launch_parameters.padded_head_dim(key_dim),
        VALUE_DIM=value_dim, PADDED_VALUE_DIM=launch_parameters.padded_head_dim(value_dim),
        BLOCK_SIZE=block_size, BLOCK_STRIDE=kv.stride(0), ROW=token_width(kv),
        HEAD_SIZE=block_size * kv.shape[5], INT8=is_int8(kv),
        QUERY_TILE=parameters.query_tile, KEY_TILE=parameters.key_tile,
        OVERLAP=parameters.overlap,
        num_warps=parameters.num_warps, num_stages=parameters.num_stages,
    )  # fmt: skip


# Do not specialise on what differs from step to step: serving must not wait for a compiler.
@triton.jit(
    do_not_specialize=["layer", "window"],
    do_not_specialize_on_alignment=["table_starts"],
)
def _attend_tiles(
    query, kv, block_tables, table_starts, context_lens, query_starts, work, out,
    layer, query_row_stride, query_head_stride, out_row_stride, out_head_stride,
    layer_stride, scale, in_tanh, window, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, ROW: tl.constexpr,
    HEAD_SIZE: tl.constexpr, INT8: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend for a tile of rows of one head.

    BLOCK_STRIDE: elements from a block to the next; the compiler multiplies by a constant in fewer
    instructions. ROW: elements of the cache for one token of a head, without a scale. HEAD_SIZE:
    elements of one head in one block. OVERLAP: see `_attend_overlapping`.
    """
    item, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    # The item is read before it is known to exist, so that all loads are under way at once.
    job, tile = tl.load(work + 1 + 2 * item), tl.load(work + 2 + 2 * item)
    if item >= tl.load(work):
        return
    first_row, last_row = tl.load(query_starts + job), tl.load(query_starts + job + 1)
    table = block_tables + tl.load(table_starts + job)
    context = tl.load(context_lens + job)
    start = tile * QUERY_TILE
    rows = start + tl.arange(0, QUERY_TILE)
    key_dims, value_dims = tl.arange(0, PADDED_KEY_DIM), tl.arange(0, PADDED_VALUE_DIM)
    is_row = (rows < last_row - first_row)[:, None]
    queries = query + first_row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(
        queries + rows.to(tl.int64)[:, None] * query_row_stride + key_dims[None, :],
        mask=is_row & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    before = context - (last_row - first_row)
    positions = before + rows
    kv_head = head // (HEADS // KV_HEADS)
    keys = kv + layer * layer_stride + kv_head * HEAD_SIZE
    values = keys + KV_HEADS * HEAD_SIZE
    maximum = tl.full([QUERY_TILE], NO_SCORE, tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    result = tl.zeros([QUERY_TILE, PADDED_VALUE_DIM], tl.float32)
    # All rows see the keys up to the first row's own position.
    seen_by_all = (before + start + 1) // KEY_TILE * KEY_TILE
    end = tl.minimum(before + start + QUERY_TILE, context)
    first, begin, all_see_from = None, 0, 0
    if window is not None:
        # No row sees a key before `first`, and all rows see those from `all_see_from` on.
        first = first_visible(before + start + 1, window)
        begin = first // KEY_TILE * KEY_TILE
        hidden = first_visible(before + start + QUERY_TILE, window)
        all_see_from = tl.minimum(tl.cdiv(hidden, KEY_TILE) * KEY_TILE, seen_by_all)
    if OVERLAP:
        maximum, total, result = _attend_overlapping(
            q, maximum, total, result, keys, values, table, begin, end, all_see_from, seen_by_all,
            positions, first, scale, in_tanh, window,
            KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_STRIDE, ROW, KEY_TILE,
        )  # fmt: skip
    else:
        if window is not None:
            maximum, total, result = _attend_keys(
                q, maximum, total, result, keys, values, table, begin, all_see_from, end,
                positions, first, scale, in_tanh, window,
                KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_STRIDE, ROW, INT8, KEY_TILE, True,
            )  # fmt: skip
        maximum, total, result = _attend_keys(
            q, maximum, total, result, keys, values, table, all_see_from, seen_by_all, end,
            positions, first, scale, in_tanh, window,
            KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_STRIDE, ROW, INT8, KEY_TILE, False,
        )  # fmt: skip
        maximum, total, result = _attend_keys(
            q, maximum, total, result, keys, values, table, seen_by_all, end, end,
            positions, first, scale, in_tanh, window,
            KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_STRIDE, ROW, INT8, KEY_TILE, True,
        )  # fmt: skip
    result = result / total[:, None]
    if sinks is not None:
        result *= share_beside_sinks(maximum + tl.log2(total), sinks, head, None)[:, None]
    outs = out + first_row.to(tl.int64) * out_row_stride + head * out_head_stride
    tl.store(
        outs + rows.to(tl.int64)[:, None] * out_row_stride + value_dims[None, :],
        result.to(out.dtype.element_ty), mask=is_row & (value_dims < VALUE_DIM)[None, :],
    )  # fmt: skip


@triton.jit
def _attend_keys(
    q, maximum, total, result, keys, values, table, start, stop, end, positions, first,
    scale, in_tanh, window,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, ROW: tl.constexpr, INT8: tl.constexpr, KEY_TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax of the rows at `positions` over the keys [start, stop).

    start is a multiple of KEY_TILE. MASKED: a key may lie behind a row or from `end` on, or before
    a row's window. first: the first key that any row sees, or None.
    """
    for tile in range(start, stop, KEY_TILE):
        read = tile + tl.arange(0, KEY_TILE)
        if MASKED:
            read = _positions_to_read(tile, first, end, KEY_TILE)
        vectors, scales = token_offsets(table, BLOCK_STRIDE, read, ROW, BLOCK_SIZE)
        k = load_tokens(keys, vectors, scales, q.dtype, KEY_DIM, q.shape[1], INT8)
        scores = _scores(q, k, in_tanh)
        if MASKED:
            scores = _without_hidden(scores, tile, positions, window)
        weights, correction, maximum, total = _weigh(scores, scale, maximum, total)
        v = load_tokens(values, vectors, scales, q.dtype, VALUE_DIM, result.shape[1], INT8)
        result = _add_product(weights.to(v.dtype), v, result, correction)
    return maximum, total, result


@triton.jit
def _attend_overlapping(
    q, maximum, total, result, keys, values, table, begin, end, all_see_from, seen_by_all,
    positions, first, scale, in_tanh, window,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, ROW: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """The same over all keys [begin, end), with products that run during a softmax.

    The tensor cores of 9.0 multiply while a warp does other things, until it needs the product. So
    the weights of a tile are multiplied by its values one iteration later, between the scores and
    the softmax of the next tile. Weights are rounded only after the scores are there: until then
    the last product may still read the registers that they get.

    There is one loop, because the pipeline of loads starts anew with each. Entries of the block
    table are loaded a tile ahead. What the loop passes on for its loads must have been computed in
    it: Triton's pipeline loads from the wrong addresses if `last` is what the loop got from the
    iteration before.
    """
    blocks = _table_entries(table, begin, first, end, BLOCK_SIZE, KEY_TILE)
    last = _vector_numbers(blocks, begin, first, end, BLOCK_SIZE, BLOCK_STRIDE, ROW, KEY_TILE)
    weights = tl.zeros([q.shape[0], KEY_TILE], tl.float32)  # the first product adds nothing
    correction = total
    for tile in range(begin, end, KEY_TILE):
        next_blocks = _table_entries(table, tile + KEY_TILE, first, end, BLOCK_SIZE, KEY_TILE)
        numbers = _vector_numbers(blocks, tile, first, end, BLOCK_SIZE, BLOCK_STRIDE, ROW, KEY_TILE)
        k = load_tokens(keys, numbers.to(tl.int64) * ROW, None, q.dtype, KEY_DIM, q.shape[1], False)
        scores = _scores(q, k, in_tanh)
        result = _add_last_product(weights, values, last, result, correction, VALUE_DIM, ROW)
        is_any_hidden = tile + KEY_TILE > seen_by_all
        if window is not None:
            is_any_hidden |= tile < all_see_from
        if is_any_hidden:
            scores = _without_hidden(scores, tile, positions, window)
        weights, correction, maximum, total = _weigh(scores, scale, maximum, total)
        last, blocks = numbers, next_blocks
    result = _add_last_product(weights, values, last, result, correction, VALUE_DIM, ROW)
    return maximum, total, result


@triton.jit
def _add_last_product(
    weights, values, numbers, result, correction, VALUE_DIM: tl.constexpr, ROW: tl.constexpr
):  # fmt: skip
    """numbers: `_vector_numbers` of the values to which the weights belong."""
    vectors = numbers.to(tl.int64) * ROW
    v = load_tokens(
        values, vectors, None, values.dtype.element_ty, VALUE_DIM, result.shape[1], False
    )
    return _add_product(weights.to(v.dtype), v, result, correction)


@triton.jit
def _scores(q, k, in_tanh):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if in_tanh is not None:
        scores = tanh_of(scores, in_tanh)
    return scores


@triton.jit
def _without_hidden(scores, tile, positions, window):
    """The scores of the keys from `tile` on, -inf where the row at a position does not see the key.
    No row sees a key from the end of its context on."""
    keys = tile + tl.arange(0, scores.shape[1])
    is_visible = keys[None, :] <= positions[:, None]
    if window is not None:
        is_visible &= keys[None, :] > positions[:, None] - window
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def _weigh(scores, scale, maximum, total):
    """Weights of a tile's keys, and by how much those of earlier tiles become less; new maximum and
    total."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    correction = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores * scale - new_maximum[:, None])
    return weights, correction, new_maximum, total * correction + tl.sum(weights, axis=1)


@triton.jit
def _add_product(weights, v, result, correction):
    return tl.dot(weights, v, acc=result * correction[:, None], input_precision="ieee")


@triton.jit
def _positions_to_read(tile, first, end, KEY_TILE: tl.constexpr):
    """Outside of [first, end) the nearest position within is read again. There table entries mean
    nothing, and blocks may hold NaN, which stays NaN with a weight of 0."""
    positions = tl.minimum(tile + tl.arange(0, KEY_TILE), end - 1)
    if first is not None:
        positions = tl.maximum(positions, first)
    return positions


@triton.jit
def _table_entries(
    table, tile, first, end, BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr
):  # fmt: skip
    positions = _positions_to_read(tile, first, end, KEY_TILE)
    return tl.load(table + positions.to(tl.uint32) // BLOCK_SIZE)


@triton.jit
def _vector_numbers(
    blocks, tile, first, end,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, ROW: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Where the vectors from position `tile` on are, counted in vectors from the head's place in
    block 0. Unlike offsets in elements, these numbers have 32 bits: 2^31 vectors are over 256 GB.

    blocks: the positions' `_table_entries`.
    """
    tl.static_assert(BLOCK_STRIDE % ROW == 0)
    positions = _positions_to_read(tile, first, end, KEY_TILE)
    return blocks * (BLOCK_STRIDE // ROW) + (positions & (BLOCK_SIZE - 1))
