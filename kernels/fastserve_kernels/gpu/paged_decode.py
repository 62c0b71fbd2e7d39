"""Attention of one query row for each job over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.cache_writes import store_tokens
from fastserve_kernels.gpu.dependent_launch import launch_options, wait_for_earlier
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
MERGED_ELEMENTS = 2048
"""Elements of partial results that a program loads at a time to merge them. A cache in INT8, whose
loop needs more registers, leaves room for half as many."""


@dataclass(frozen=True)
class DecodeScratch:
    """Memory of `paged_decode` for contexts of several splits. Calls on one stream may share it.

    partials: float32, the results of all splits, row after row, and then their log-sum-exps.
    arrived: int32, how many splits of a row and KV head have their result; zeros between calls.
    """

    partials: Tensor
    arrived: Tensor


def decode_scratch(
    capacity: int, heads: int, value_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch memory for work lists of up to `capacity` items."""
    size = capacity * heads * (value_dim + 1)
    return DecodeScratch(
        torch.empty(size, dtype=torch.float32, device=device),
        torch.zeros(capacity * heads, dtype=torch.int32, device=device),
    )


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
    scratch: DecodeScratch,
    new: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Attention of B queries over the paged cache, one row for each job.

    query: [B, heads, key_dim] of the model's dtype; only the last dimension must be contiguous.
        heads is a multiple of kv_heads.
    kv: see `fastserve_kernels.ops`; block_size is a power of two.
    block_tables, table_starts: [N] and [B] or longer, see `fastserve_kernels.ops`.
    context_lens: int32 [B]; 0 is a row that does not decode: padding, or a prompt's, to which
        `paged_prefill` writes later. Its row of out becomes zeros.
    work: from `work_lists.decode_work` for these lengths, and for the rule's window or for none.
    rule: its sinks are on the device.
    out: [B, heads, value_dim] of query's dtype; only the last dimension must be contiguous.
    scratch: from `decode_scratch`, for at least the capacity of work.
    new: key and value of each row's last token, [B, kv_heads, key_dim] and [B, kv_heads, value_dim]
        of query's dtype; only the last dimension must be contiguous. They are written to the cache
        first, as by `ops.kv_write`. None: the cache has them.

    A row's result is bit for bit independent of the other rows. The grid does not depend on the
    tensors' content: each of n programs takes every n-th (item, KV head) of the work. The program
    that finishes the last split of a row merges them, in their order.
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
    new_strides = (0,) * 4 if new is None else (*new[0].stride()[:2], *new[1].stride()[:2])
    programs = multiprocessors(query.device) * parameters.programs_per_multiprocessor
    merged_elements = MERGED_ELEMENTS // 2 if is_int8(kv) else MERGED_ELEMENTS
    merged_rows = max(merged_elements // padded_value_dim, launch_parameters.next_power_of_2(group))
    _attend_splits[(min(programs, max(capacity * kv_heads, rows)),)](
        query, kv, block_tables, table_starts, context_lens, work, out,
        scratch.partials, scratch.arrived,
        *(new or (None, None)), layer, rows, capacity,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), *new_strides,
        kv.stride(0), kv.stride(1), **rule_arguments(rule),
        KV_HEADS=kv_heads, GROUP=group, QUERY_ROWS=query_rows(group),
        MERGED_ROWS=merged_rows,
        KEY_DIM=key_dim, PADDED_KEY_DIM=launch_parameters.padded_head_dim(key_dim),
        VALUE_DIM=value_dim, PADDED_VALUE_DIM=padded_value_dim,
        BLOCK_SIZE=block_size, ROW=token_width(kv), HEAD_SIZE=block_size * kv.shape[5],
        INT8=is_int8(kv),
        SPLIT=SPLIT_TOKENS, KEY_TILE=parameters.key_tile, NUM_STAGES=parameters.num_stages,
        num_warps=parameters.num_warps, maxnreg=launch_parameters.decode_registers(parameters),
        **launch_options(query.device),
    )  # fmt: skip


def query_rows(group: int) -> int:
    """Rows of the tile with a KV head's query heads. A single head needs no dot product."""
    return 1 if group == 1 else max(MIN_DOT_ROWS, launch_parameters.next_power_of_2(group))


# Do not specialise on what differs from step to step: serving must not wait for a compiler.
@triton.jit(do_not_specialize=["layer", "rows", "capacity", "window"])
def _attend_splits(
    query, kv, block_tables, table_starts, context_lens, work, out, partials, arrived,
    new_keys, new_values, layer, rows, capacity,
    query_row_stride, query_head_stride, out_row_stride, out_head_stride,
    new_key_stride, new_key_head_stride, new_value_stride, new_value_head_stride,
    block_stride, layer_stride, scale, in_tanh, window, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, HEAD_SIZE: tl.constexpr, INT8: tl.constexpr,
    SPLIT: tl.constexpr, KEY_TILE: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend for each (item, KV head). The result goes to out if its row sees one split, else to
    the partial results. An item before the window has no result.

    ROW: elements of the cache for one token of a head, without a scale. HEAD_SIZE: elements of one
    head in one block.
    """
    # Another kernel of the step writes even the work list.
    wait_for_earlier(PDL)
    items = work + 1 + rows
    key_dims, value_dims = tl.arange(0, PADDED_KEY_DIM), tl.arange(0, PADDED_VALUE_DIM)
    group_rows = tl.arange(0, QUERY_ROWS)
    is_head = group_rows < GROUP
    is_output = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    log_sums = partials + capacity.to(tl.int64) * (KV_HEADS * GROUP * VALUE_DIM)
    for index in tl.range(
        tl.program_id(0), tl.load(work) * KV_HEADS, tl.num_programs(0), disable_licm=True
    ):
        item, kv_head = index // KV_HEADS, index % KV_HEADS
        row, split = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
        table = block_tables + tl.load(table_starts + row)
        context = tl.load(context_lens + row)
        heads = kv_head * GROUP + group_rows
        queries = query + row.to(tl.int64) * query_row_stride + kv_head * GROUP * query_head_stride
        start = split * SPLIT
        end = tl.minimum(context, start + SPLIT)
        if window is not None:
            start = tl.maximum(start, context - window)
        side_stride = KV_HEADS * HEAD_SIZE
        keys = kv + layer * layer_stride + kv_head * HEAD_SIZE
        if new_keys is not None:
            # The program that reads the row's last token has it written before. No other program
            # of this launch reads it.
            last = context - 1
            if last < end:
                block = tl.load(table + last // BLOCK_SIZE)
                token = keys + block.to(tl.int64) * block_stride
                place = last % BLOCK_SIZE
                row_of_keys = new_keys + row.to(tl.int64) * new_key_stride
                row_of_values = new_values + row.to(tl.int64) * new_value_stride
                _write_token(
                    row_of_keys + kv_head * new_key_head_stride, token, place,
                    KEY_DIM, PADDED_KEY_DIM, BLOCK_SIZE, ROW, INT8,
                )  # fmt: skip
                _write_token(
                    row_of_values + kv_head * new_value_head_stride, token + side_stride, place,
                    VALUE_DIM, PADDED_VALUE_DIM, BLOCK_SIZE, ROW, INT8,
                )  # fmt: skip
                tl.debug_barrier()
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
        first_split = 0
        seen_splits = tl.cdiv(context, SPLIT)
        if window is not None:
            first_split = first_visible(context, window) // SPLIT
            seen_splits = tl.where(split < first_split, 0, seen_splits - first_split)
        out_heads = out + row.to(tl.int64) * out_row_stride + kv_head * GROUP * out_head_stride
        if seen_splits == 1:
            if sinks is not None:
                result *= share_beside_sinks(log_sum, sinks, heads, is_head)[:, None]
            offsets = group_rows[:, None] * out_head_stride + value_dims[None, :]
            tl.store(out_heads + offsets, result.to(out.dtype.element_ty), mask=is_output)
        elif seen_splits > 1:
            place = tl.load(work + 1 + row).to(tl.int64)
            partial = (place + split) * (KV_HEADS * GROUP) + heads
            tl.store(
                partials + partial[:, None] * VALUE_DIM + value_dims[None, :], result,
                mask=is_output,
            )  # fmt: skip
            tl.store(log_sums + partial, log_sum, mask=is_head)
            # One thread counts. The barrier puts the stores of all threads before that, so that who
            # counts last sees the results of all splits.
            tl.debug_barrier()
            count = arrived + ((place + first_split) * KV_HEADS + kv_head)
            before = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
            if before == seen_splits - 1:
                tl.store(count, 0)
                _merge_splits(
                    partials, log_sums, place + first_split, seen_splits, kv_head * GROUP,
                    out_heads, out_head_stride, sinks,
                    KV_HEADS * GROUP, GROUP, MERGED_ROWS, VALUE_DIM, PADDED_VALUE_DIM,
                )  # fmt: skip
    # Padding has no items. The last programs, which have the least work, begin.
    for row in range(tl.num_programs(0) - 1 - tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(context_lens + row) == 0:
            for first_head in range(0, KV_HEADS * GROUP, MERGED_ROWS):
                heads = first_head + tl.arange(0, MERGED_ROWS)
                inside = (heads < KV_HEADS * GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
                offsets = heads[:, None] * out_head_stride + value_dims[None, :]
                tl.store(out + row * out_row_stride.to(tl.int64) + offsets, 0.0, mask=inside)


@triton.jit
def _write_token(
    new, token_head, place, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """token_head: the head's place in the token's block."""
    dims = tl.arange(0, PADDED_DIM)[None, :]
    values = tl.load(new + dims, mask=dims < DIM, other=0.0)
    head = token_head + tl.zeros([1, 1], tl.int64)
    store_tokens(
        head, place, dims, values, dims < DIM, tl.full([1, 1], True, tl.int1), BLOCK_SIZE, ROW, INT8
    )


@triton.jit
def _merge_splits(
    partials, log_sums, first, splits, first_head, out_heads, out_head_stride, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MERGED_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the results of a row's splits for a KV head's query heads, weighted by their sums.

    first: the place of the first split. A tile has MERGED_ROWS results: those of some splits, each
    with all the group's heads.
    """
    HEADS_TILE: tl.constexpr = triton.next_power_of_2(GROUP)
    SPLITS: tl.constexpr = MERGED_ROWS // HEADS_TILE
    rows = tl.arange(0, MERGED_ROWS)
    of_split, of_head = rows // HEADS_TILE, rows % HEADS_TILE
    partial = (first + of_split) * HEADS + first_head + of_head
    dims = tl.arange(0, PADDED_VALUE_DIM)
    # First the largest sum: if results were scaled again at the end, the compiler would fuse that
    # with their addition, and threads that add the same numbers would round them differently.
    highest = tl.full([MERGED_ROWS], NO_SCORE, tl.float32)
    for tile in tl.range(0, splits, SPLITS, num_stages=2):
        inside = (tile + of_split < splits) & (of_head < GROUP)
        log_sum = tl.load(log_sums + partial + tile * HEADS, mask=inside, other=NO_SCORE)
        highest = tl.maximum(highest, log_sum)
    highest = tl.max(tl.reshape(highest, SPLITS, HEADS_TILE), axis=0)
    of_rows = tl.broadcast_to(highest[None, :], SPLITS, HEADS_TILE)
    of_rows = tl.reshape(of_rows, MERGED_ROWS)
    total = tl.zeros([MERGED_ROWS], tl.float32)
    result = tl.zeros([MERGED_ROWS, PADDED_VALUE_DIM], tl.float32)
    for tile in tl.range(0, splits, SPLITS, num_stages=2):
        inside = (tile + of_split < splits) & (of_head < GROUP)
        at = partial + tile * HEADS
        log_sum = tl.load(log_sums + at, mask=inside, other=float("-inf"))
        part = tl.load(
            partials + at[:, None] * VALUE_DIM + dims[None, :],
            mask=inside[:, None] & (dims < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        weights = tl.exp2(log_sum - of_rows)
        total += weights
        result += weights[:, None] * part
    total = tl.sum(tl.reshape(total, SPLITS, HEADS_TILE), axis=0)
    result = tl.sum(tl.reshape(result, SPLITS, HEADS_TILE, PADDED_VALUE_DIM), axis=0)
    merged = result / total[:, None]
    heads = tl.arange(0, HEADS_TILE)
    is_head = heads < GROUP
    if sinks is not None:
        log_total = highest + tl.log2(total)
        merged *= share_beside_sinks(log_total, sinks, first_head + heads, is_head)[:, None]
    tl.store(
        out_heads + heads[:, None] * out_head_stride + dims[None, :],
        merged.to(out_heads.dtype.element_ty),
        mask=is_head[:, None] & (dims < VALUE_DIM)[None, :],
    )  # fmt: skip


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
