"""Multiplies rows by a weight of few bits, which is dequantized in registers."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.dense_linear import widened_linear
from fastserve_kernels.gpu.dependent_launch import (
    launch_dependents,
    launch_options,
    wait_for_earlier,
)
from fastserve_kernels.gpu.device import capability, multiprocessors
from fastserve_kernels.gpu.launch_parameters import cdiv
from fastserve_kernels.gpu.packed_weight import (
    BLOCK_WORDS,
    COLUMNS_MULTIPLE,
    PackedWeight,
    dequantize,
    load_numbers,
)

MOST_ROWS = 256
"""With more rows it takes less time to dequantize the weight in memory, for torch's product."""
# A split of the columns has at least so many steps, as its loads take three to get going.
_FEWEST_STEPS = 4
_SUM_TILE = 1024
_REGISTERS = 65536
"""Of a multiprocessor."""


def variants(dtype: torch.dtype, device: torch.device) -> list[int]:
    """Numbers of rows such that each compiles other variants for this dtype."""
    ways = launch_parameters.quantized_ways(dtype.itemsize, capability(device))
    return [*(way.row_tile for way in ways), MOST_ROWS + 1]


def quantized_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, relu: bool, y: Tensor
) -> None:
    """y = x @ dequantized weight.T + bias, with products in x's dtype and sums in fp32, rounded
    once. The weight is rounded to x's dtype.

    x: [T, in], rows contiguous, T > 0.
    bias: [out] of x's dtype, or None.
    y: [T, out] of x's dtype, rows contiguous.
    Grid: (tiles of T, tiles of out, splits of the columns). With several splits, a second kernel
    adds up their sums. More than `MOST_ROWS` rows are multiplied by torch.
    """
    rows = len(x)
    if rows > MOST_ROWS:
        widened_linear(x, partial(weight.dequantized, x.dtype), bias, relu, y)
        return
    parameters = launch_parameters.quantized_linear(rows, x.element_size(), capability(x.device))
    out_tiles = cdiv(weight.out_features, parameters.out_tile)
    row_words = weight.words.shape[1]
    steps = row_words * 32 // weight.layout.bits // COLUMNS_MULTIPLE
    programs = parameters.programs_per_multiprocessor * multiprocessors(x.device)
    splits = max(1, min(programs // out_tiles, steps // _FEWEST_STEPS))
    steps_of_split = cdiv(steps, splits)
    splits = cdiv(steps, steps_of_split) if steps else 1
    row_tiles = cdiv(rows, parameters.row_tile)
    sums = y
    if splits > 1:
        # Whole tiles, so that the kernels' alignment does not depend on the number of rows.
        shape = (splits, row_tiles * parameters.row_tile, weight.out_features)
        sums = torch.empty(shape, dtype=torch.float32, device=y.device)
    _quantized_linear[(row_tiles, out_tiles, splits)](
        x, weight.words, weight.scales, weight.offsets, bias if splits == 1 else None, sums,
        rows, weight.out_features, weight.in_features, row_words, weight.scales.shape[1],
        steps_of_split, x.stride(0), sums.stride(-2), sums.stride(0), **weight.layout.constants,
        RELU=relu and splits == 1, HAS_REST=weight.in_features % COLUMNS_MULTIPLE > 0,
        BLOCK_WORDS=BLOCK_WORDS, ROW_TILE=parameters.row_tile, OUT_TILE=parameters.out_tile,
        num_warps=parameters.num_warps, num_stages=parameters.num_stages,
        maxnreg=_REGISTERS // (parameters.programs_per_multiprocessor * 32 * parameters.num_warps),
    )  # fmt: skip
    if splits > 1:
        _add_splits[(rows, cdiv(weight.out_features, _SUM_TILE))](
            sums, bias, y, splits, weight.out_features, sums.stride(0), y.stride(0),
            RELU=relu, TILE=_SUM_TILE, num_warps=4, **launch_options(x.device),
        )  # fmt: skip


# As in `_int8_linear`, the weight's tile is the first factor. Each warp has all columns of its own
# rows of the weight, so that no code is dequantized twice.
@triton.jit
def sums_of_tile(
    row_of_x, has_row, row_of_words, scales, offsets, out, has_out, in_features, row_scales,
    first, last,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, GROUP: tl.constexpr, CENTER: tl.constexpr,
    IS_WIDE: tl.constexpr, HAS_REST: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr,
):  # fmt: skip
    """float32 [OUT_TILE, ROW_TILE], over the blocks of words from `first` up to `last`.

    row_of_x, row_of_words: pointers to rows, [1, ROW_TILE] and [OUT_TILE, 1].
    out: [OUT_TILE], the weight's rows. has_out: which of them are read; None: all.
    """
    BLOCKS: tl.constexpr = BITS // 4  # a step, of 128 columns
    inner = tl.arange(0, BLOCK_WORDS)
    mask = None if has_out is None else has_out[:, None]
    sums = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
    for start in range(first, last, BLOCKS):
        for block in tl.static_range(BLOCKS):
            codes = tl.load(row_of_words + (start + block) * BLOCK_WORDS + inner[None, :], mask)
            # In three dimensions, as the compiler then dequantizes them where the product wants
            # them, without a detour through shared memory.
            codes = tl.reshape(codes, OUT_TILE, 1, BLOCK_WORDS)
            for place in tl.static_range(32 // BITS):
                begin = (start + block) * (32 // BITS * BLOCK_WORDS) + place * BLOCK_WORDS
                if place * BLOCK_WORDS % GROUP == 0:
                    numbers = (begin // GROUP).to(tl.int64) * row_scales + out[:, None]
                    scale, low = load_numbers(scales, offsets, numbers, CENTER, mask)
                at = begin + inner
                has_x = has_row[None, :]
                if HAS_REST:
                    has_x = has_x & (at < in_features)[:, None]
                values = tl.load(row_of_x + at[:, None], has_x, other=0.0)
                weight = dequantize(
                    codes, scale[:, :, None], low[:, :, None], place, BITS, IS_FLOAT, IS_WIDE
                )
                weight = tl.reshape(weight, OUT_TILE, BLOCK_WORDS).to(values.dtype)
                sums = tl.dot(weight, values, acc=sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["rows", "steps"])
def _quantized_linear(
    x, words, scales, offsets, bias, y, rows, out_features, in_features, row_words, row_scales,
    steps, x_stride, y_stride, split_stride,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, GROUP: tl.constexpr, CENTER: tl.constexpr,
    IS_WIDE: tl.constexpr, RELU: tl.constexpr, HAS_REST: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    out = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    has_row, has_out = row < rows, out < out_features
    row_of_x = x + row.to(tl.int64)[None, :] * x_stride
    row_of_words = words + out.to(tl.int64)[:, None] * row_words
    blocks: tl.constexpr = BITS // 4  # a step, of 128 columns
    first = tl.program_id(2) * steps * blocks
    last = tl.minimum(first + steps * blocks, row_words // BLOCK_WORDS)
    sums = sums_of_tile(
        row_of_x, has_row, row_of_words, scales, offsets, out, None, in_features, row_scales,
        first, last, BITS, IS_FLOAT, GROUP, CENTER, IS_WIDE, HAS_REST, BLOCK_WORDS, ROW_TILE,
        OUT_TILE,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + out, has_out, other=0.0).to(tl.float32)[:, None]
    if RELU:
        sums = tl.maximum(sums, 0.0, tl.PropagateNan.ALL)
    y += tl.program_id(2).to(tl.int64) * split_stride
    tl.store(
        y + row.to(tl.int64)[None, :] * y_stride + out[:, None],
        sums.to(y.dtype.element_ty), has_out[:, None] & has_row[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _add_splits(
    sums, bias, y, splits, out_features, split_stride, y_stride,
    RELU: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * TILE + tl.arange(0, TILE)
    has_out = out < out_features
    of_split = sums + row * out_features + out
    if bias is not None:
        shift = tl.load(bias + out, has_out, other=0.0).to(tl.float32)
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(splits):
        total += tl.load(of_split, has_out, other=0.0)
        of_split += split_stride
    if bias is not None:
        total += shift
    if RELU:
        total = tl.maximum(total, 0.0, tl.PropagateNan.ALL)
    tl.store(y + row * y_stride + out, total.to(y.dtype.element_ty), has_out)
