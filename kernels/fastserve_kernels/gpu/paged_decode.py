"""Attention of one query row for each job over the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.device import capability, multiprocessors
from fastserve_kernels.gpu.paged_cache import (
    NO_SCORE,
    first_visible,
    load_tokens,
    rule_arguments,
    share_beside_sinks,
    tanh_of,
    token_offsets,
)
from fastserve_kernels.gpu.work_lists import SPLIT_TOKENS, decode_capacity
from fastserve_kernels.int8_cache import is_int8, token_width

MIN_DOT_ROWS = 16
"""Rows of the tensor cores' smallest tile."""
MERGED_SPLITS = 8
"""How many splits the merge loads at a time."""


def decode_scratch(capacity: int, heads: int, value_dim: int, device: torch.device) -> Tensor:
    """Scratch memory of `paged_decode` for work lists of up to `capacity` items.

    Returns float32 [capacity * heads * (value_dim + 1)], uninitialised. It is for the partial
    results of all splits, row after row, and then their log-sum-exps. Calls on one stream may share
    it.
    """
    return torch.empty(capacity * heads * (value_dim + 1), dtype=torch.float32, device=device)


def paged_decode(
    query: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    table_starts: Tensor,
    context_lens: Tensor,
    work: Tensor,
    rule: AttentionRule,
    out: Tensor,
    scratch: Tensor,
) -> None:
    """Attention of B queries over the paged cache, one row for each job.

    query: [B, heads, key_dim] of the model's dtype; only the last dimension must be contiguous.
        heads is a multiple of kv_heads.
    kv: see `fastserve_kernels.ops`; block_size is a power of two.
    block_tables, table_starts: [N] and [B], see `fastserve_kernels.ops`.
    context_lens: int32 [B]; 0 is padding, whose row of out is zeros.
    work: from `work_lists.decode_work` for these lengths, and for the rule's window or for none.
    rule: its sinks are on the device.
    out: [B, heads, value_dim] of query's dtype; only the last dimension must be contiguous.
    scratch: from `decode_scratch`, for at least the capacity of work.

    A row's result is bit for bit independent of the other rows. There are two kernels, and neither
    grid depends on the tensors' content:

    - n programs compute the splits; each takes every n-th (item, KV head) of the work.
    - (rows, heads) programs merge the splits of rows that have several, in order, and write zeros
      for padding.
    """
    rows, heads, key_dim = query.shape
    value_dim = out.shape[2]
    if rows == 0:
        return
    kv_heads, block_size = kv.shape[3:5]
    group = heads // kv_heads
    capacity = decode_capacity(work.numel(), rows)
    padded_value_dim = launch_parameters.padded_head_dim(value_dim)
    parameters = launch_parameters.decode(
        max(key_dim, value_dim), query.element_size(), group, capability(query.device), is_int8(kv)
    )
    programs = multiprocessors(query.device) * parameters.programs_per_multiprocessor
    if capacity:
        _attend_splits[(min(programs, capacity * kv_heads),)](
            query, kv, block_tables, table_starts, context_lens, work, out, scratch,
            layer, rows, capacity,
            query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            kv.stride(0), kv.stride(1), **rule_arguments(rule),
            KV_HEADS=kv_heads, GROUP=group, QUERY_ROWS=query_rows(group),
            KEY_DIM=key_dim, PADDED_KEY_DIM=launch_parameters.padded_head_dim(key_dim),
            VALUE_DIM=value_dim, PADDED_VALUE_DIM=padded_value_dim,
            BLOCK_SIZE=block_size, ROW=token_width(kv), HEAD_SIZE=block_size * kv.shape[5],
            INT8=is_int8(kv),
            SPLIT=SPLIT_TOKENS, KEY_TILE=parameters.key_tile, NUM_STAGES=parameters.num_stages,
            num_warps=parameters.num_warps,
        )  # fmt: skip
    _merge_splits[(rows, heads)](
        context_lens, work, out, scratch, capacity, out.stride(0), out.stride(1),
        rule.window, rule.sinks,
        HEADS=heads, VALUE_DIM=value_dim, PADDED_VALUE_DIM=padded_value_dim, SPLIT=SPLIT_TOKENS,
        SPLIT_TILE=MERGED_SPLITS, num_warps=1,
    )  # fmt: skip


def query_rows(group: int) -> int:
    """Rows of the tile with a KV head's query heads. A single head needs no dot product."""
    return 1 if group == 1 else max(MIN_DOT_ROWS, launch_parameters.next_power_of_2(group))


# Do not specialise on what differs from step to step: serving must not wait for a compiler.
@triton.jit(do_not_specialize=["layer", "rows", "capacity", "window"])
def _attend_splits(
    query, kv, block_tables, table_starts, context_lens, work, out, scratch,
    layer, rows, capacity,
    query_row_stride, query_head_stride, out_row_stride, out_head_stride,
    block_stride, layer_stride, scale, in_tanh, window, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, HEAD_SIZE: tl.constexpr, INT8: tl.constexpr,
    SPLIT: tl.constexpr, KEY_TILE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Attend for each (item, KV head). The result goes to out if its row sees one split, else to
    scratch. So does that of a split before the window, which is not read, and whose result means
    nothing.

    ROW: elements of the cache for one token of a head, without a scale. HEAD_SIZE: elements of one
    head in one block.
    """
    items = work + 1 + rows
    key_dims, value_dims = tl.arange(0, PADDED_KEY_DIM), tl.arange(0, PADDED_VALUE_DIM)
    group_rows = tl.arange(0, QUERY_ROWS)
    is_head = group_rows < GROUP
    is_output = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    for index in range(tl.program_id(0), tl.load(work) * KV_HEADS, tl.num_programs(0)):
        item, kv_head = index // KV_HEADS, index % KV_HEADS
        row, split = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
        table = block_tables + tl.load(table_starts + row)
        context = tl.load(context_lens + row)
        heads = kv_head * GROUP + group_rows
        queries = query + row.to(tl.int64) * query_row_stride + kv_head * GROUP * query_head_stride
        start = split * SPLIT
        end = tl.minimum(context, start + SPLIT)
        is_only_split = context <= SPLIT
        if window is not None:
            start = tl.maximum(start, context - window)
            first_split = first_visible(context, window) // SPLIT
            is_only_split = (context - first_split * SPLIT <= SPLIT) & (start < end)
        side_stride = KV_HEADS * HEAD_SIZE
        keys = kv + layer * layer_stride + kv_head * HEAD_SIZE
        if GROUP == 1:
            result, log_sum = _attend_one_head(
                queries, keys, keys + side_stride, table, block_stride, start, end, scale, in_tanh,
                KEY_DIM, PADDED_KEY_DIM, VALUE_DIM, PADDED_VALUE_DIM, BLOCK_SIZE, ROW, INT8,
                KEY_TILE, NUM_STAGES,
            )  # fmt: skip
        else:
            q_offsets = group_rows[:, None] * query_head_stride + key_dims[None, :]
            is_query = is_head[:, None] & (key_dims < KEY_DIM)[None, :]
            q = tl.load(queries + q_offsets, mask=is_query, other=0.0)
            result, log_sum = _attend_group(
                q, keys, keys + side_stride, table, block_stride, start, end, scale, in_tanh,
                KEY_DIM, PADDED_KEY_DIM, VALUE_DIM, PADDED_VALUE_DIM, BLOCK_SIZE, ROW, INT8,
                KEY_TILE, NUM_STAGES,
            )  # fmt: skip
        if is_only_split:
            if sinks is not None:
                result *= share_beside_sinks(log_sum, sinks, heads, is_head)[:, None]
            offsets = row.to(tl.int64) * out_row_stride + heads * out_head_stride
            tl.store(
                out + offsets[:, None] + value_dims[None, :],
                result.to(out.dtype.element_ty), mask=is_output,
            )  # fmt: skip
        else:
            place = tl.load(work + 1 + row) + split
            partial = (place * (KV_HEADS * GROUP) + heads).to(tl.int64)
            tl.store(
                scratch + partial[:, None] * VALUE_DIM + value_dims[None, :], result, mask=is_output
            )
            log_sums = scratch + capacity.to(tl.int64) * (KV_HEADS * GROUP * VALUE_DIM)
            tl.store(log_sums + partial, log_sum, mask=is_head)


@triton.jit
def _attend_one_head(
    query, keys, values, table, block_stride, start, end, scale, in_tanh,
    KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, INT8: tl.constexpr,
    KEY_TILE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One query over [start, end), by sums of products: dot products need more rows.

    Each place of the tile runs its own softmax over every KEY_TILE-th token. They are merged after
    the loop, so that within it no warp waits for another.
    """
    dims = tl.arange(0, PADDED_KEY_DIM)
    # The query is one row of a tile in the shape of K's tiles, so that the loop converts no layout.
    row = tl.arange(0, KEY_TILE)
    q = tl.load(
        query + row[:, None] * KEY_DIM + dims[None, :],
        mask=(row == 0)[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip
    q = tl.sum(q.to(tl.float32), axis=0)[None, :]
    q *= scale if in_tanh is None else in_tanh
    maximum = tl.full([KEY_TILE], NO_SCORE, tl.float32)
    total = tl.zeros([KEY_TILE], tl.float32)
    result = tl.zeros([KEY_TILE, PADDED_VALUE_DIM], tl.float32)
    for tile in tl.range(start, end, KEY_TILE, num_stages=NUM_STAGES):
        positions = tile + tl.arange(0, KEY_TILE)
        within = positions < end
        # Past the end read the last token again: loads run tiles ahead, and a mask would have to be
        # kept until then.
        read = tl.minimum(positions, end - 1)
        vectors, scales = token_offsets(table, block_stride, read, ROW, BLOCK_SIZE)
        k = load_tokens(keys, vectors, scales, tl.float32, KEY_DIM, PADDED_KEY_DIM, INT8)
        v = load_tokens(values, vectors, scales, tl.float32, VALUE_DIM, PADDED_VALUE_DIM, INT8)
        scores = tl.sum(q * k.to(tl.float32), axis=1)
        if in_tanh is not None:
            scores = tanh_of(scores, 1.0) * scale
        scores = tl.where(within, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, scores)
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum)
        total = total * correction + weights
        result = result * correction[:, None] + weights[:, None] * v.to(tl.float32)
        maximum = new_maximum
    highest = tl.max(maximum, axis=0)
    shares = tl.exp2(maximum - highest)
    total = tl.sum(total * shares, axis=0)
    result = tl.sum(result * shares[:, None], axis=0) / total
    return result[None, :], tl.full([1], 0.0, tl.float32) + (highest + tl.log2(total))


@triton.jit
def _attend_group(
    q, keys, values, table, block_stride, start, end, scale, in_tanh,
    KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, INT8: tl.constexpr,
    KEY_TILE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A KV head's query heads, [QUERY_ROWS, PADDED_KEY_DIM], over [start, end), by dot products."""
    QUERY_ROWS: tl.constexpr = q.shape[0]
    maximum = tl.full([QUERY_ROWS], NO_SCORE, tl.float32)
    # One sum for each place of the tile. They are added after the loop, because warps must sync.
    total = tl.zeros([QUERY_ROWS, KEY_TILE], tl.float32)
    result = tl.zeros([QUERY_ROWS, PADDED_VALUE_DIM], tl.float32)
    for tile in tl.range(start, end, KEY_TILE, num_stages=NUM_STAGES):
        positions = tile + tl.arange(0, KEY_TILE)
        within = positions < end
        read = tl.minimum(positions, end - 1)
        vectors, scales = token_offsets(table, block_stride, read, ROW, BLOCK_SIZE)
        k = load_tokens(keys, vectors, scales, q.dtype, KEY_DIM, PADDED_KEY_DIM, INT8)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if in_tanh is not None:
            scores = tanh_of(scores, in_tanh)
        scores = tl.where(within[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        total = total * correction[:, None] + weights
        v = load_tokens(values, vectors, scales, q.dtype, VALUE_DIM, PADDED_VALUE_DIM, INT8)
        result = tl.dot(
            weights.to(v.dtype), v, acc=result * correction[:, None], input_precision="ieee"
        )
        maximum = new_maximum
    total = tl.sum(total, axis=1)
    return result / total[:, None], maximum + tl.log2(total)


@triton.jit(do_not_specialize=["capacity", "window"])
def _merge_splits(
    context_lens, work, out, scratch, capacity, out_row_stride, out_head_stride, window, sinks,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr, SPLIT_TILE: tl.constexpr,
):  # fmt: skip
    """Merge the splits that one (row, head) sees in order, weighted by their sums."""
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, PADDED_VALUE_DIM)
    used = dims < VALUE_DIM
    context = tl.load(context_lens + row)
    splits, first = tl.cdiv(context, SPLIT), 0
    if window is not None:
        first = first_visible(context, window) // SPLIT
    if splits - first != 1:
        place = tl.load(work + 1 + row).to(tl.int64)
        log_sums = scratch + capacity.to(tl.int64) * (HEADS * VALUE_DIM)
        maximum = tl.full([SPLIT_TILE], NO_SCORE, tl.float32)
        total = tl.zeros([SPLIT_TILE], tl.float32)
        result = tl.zeros([SPLIT_TILE, PADDED_VALUE_DIM], tl.float32)
        for tile in range(first, splits, SPLIT_TILE):
            index = tile + tl.arange(0, SPLIT_TILE)
            partial = (place + index) * HEADS + head
            log_sum = tl.load(log_sums + partial, mask=index < splits, other=float("-inf"))
            part = tl.load(
                scratch + partial[:, None] * VALUE_DIM + dims[None, :],
                mask=(index < splits)[:, None] & used[None, :], other=0.0,
            )  # fmt: skip
            new_maximum = tl.maximum(maximum, log_sum)
            correction = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(log_sum - new_maximum)
            total = total * correction + weights
            result = result * correction[:, None] + weights[:, None] * part
            maximum = new_maximum
        highest = tl.max(maximum, axis=0)
        shares = tl.exp2(maximum - highest)
        total = tl.where(splits > 0, tl.sum(total * shares, axis=0), 1.0)
        merged = tl.sum(result * shares[:, None], axis=0) / total
        if sinks is not None:
            merged *= share_beside_sinks(highest + tl.log2(total), sinks, head, None)
        offset = row.to(tl.int64) * out_row_stride + head * out_head_stride
        tl.store(out + offset + dims, merged.to(out.dtype.element_ty), mask=used)
