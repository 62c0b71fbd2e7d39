"""Multiplies rows by a weight of few bits, which is widened or dequantized in registers."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.dense_linear import widened_linear
from fastserve_kernels.gpu.device import capability
from fastserve_kernels.gpu.launch_parameters import cdiv
from fastserve_kernels.gpu.packed_weight import (
    COLUMNS_MULTIPLE,
    PackedWeight,
    load_codes,
    load_numbers,
)
from fastserve_kernels.gpu.split_sums import add_splits, empty_sums, steps_of_split
from fastserve_kernels.gpu.widened_codes import (
    base,
    scalable_codes,
    scales_codes,
    widened_codes,
)

MOST_ROWS = 256
"""With more rows it takes less time to dequantize the weight in memory, for torch's product."""
_REGISTERS = 65536
"""Of a multiprocessor."""


def variants(dtype: torch.dtype, device: torch.device) -> list[int]:
    """Numbers of rows such that each compiles other variants for this dtype."""
    ways = launch_parameters.quantized_ways(dtype.itemsize, capability(device))
    return [*(way.row_tile for way in ways), MOST_ROWS + 1]


def quantized_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, relu: bool, y: Tensor
) -> None:
    """y = x @ dequantized weight.T + bias, with sums in fp32, rounded once. With up to 16 rows, and
    in FP8, the weight is not rounded; with more it is, to x's dtype.

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
    parameters = launch_parameters.quantized_linear(
        rows, x.element_size(), capability(x.device), weight.layout.is_float
    )
    row_tiles = cdiv(rows, parameters.row_tile)
    out_tiles = cdiv(weight.out_features, parameters.out_tile)
    row_codes = weight.codes.shape[1]
    steps = row_codes * weight.layout.places // COLUMNS_MULTIPLE
    steps_of_program = steps_of_split(
        out_tiles, steps, parameters.programs_per_multiprocessor, x.device
    )
    splits = max(1, cdiv(steps, steps_of_program))
    sums = y
    if splits > 1:
        sums = empty_sums(splits, row_tiles * parameters.row_tile, weight.out_features, y.device)
    _quantized_linear[(row_tiles, out_tiles, splits)](
        x, weight.codes, weight.scales, weight.offsets, bias if splits == 1 else None, sums,
        rows, weight.out_features, weight.in_features, row_codes, weight.scales.shape[1],
        steps_of_program, x.stride(0), sums.stride(-2), sums.stride(0), **weight.layout.constants,
        RELU=relu and splits == 1, HAS_REST=weight.in_features % COLUMNS_MULTIPLE > 0,
        ROW_TILE=parameters.row_tile, OUT_TILE=parameters.out_tile,
        NUM_WARPS=parameters.num_warps, NUM_STAGES=parameters.num_stages,
        num_warps=parameters.num_warps, num_stages=parameters.num_stages,
        maxnreg=_REGISTERS // (parameters.programs_per_multiprocessor * 32 * parameters.num_warps),
    )  # fmt: skip
    if splits > 1:
        add_splits(sums, bias, relu, y)


# As in `_int8_linear`, the weight's tile is the first factor. Each warp has all columns of its own
# rows of the weight, so that no code is widened twice.
@triton.jit
def sums_of_tile(
    row_of_x, has_row, row_of_codes, scales, offsets, out, has_out, in_features, row_scales,
    first, last,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_FULL: tl.constexpr, GROUP: tl.constexpr,
    CENTER: tl.constexpr, DEPTH: tl.constexpr, HAS_REST: tl.constexpr, ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr, NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """float32 [OUT_TILE, ROW_TILE], over the columns from 128 · `first` up to 128 · `last`.

    row_of_x, row_of_codes: pointers to rows, [1, ROW_TILE] and [OUT_TILE, 1].
    out: [OUT_TILE], the weight's rows. has_out: which of them are read; None: all.

    A group's sum is scale · (codes + base) · x + (offset - scale · (center + base)) · (sum of x).
    Where that would take more instructions than to scale each code, because a tile has many rows
    for a small group, products are those of the dequantized weight, rounded to x's dtype.
    """
    PLACES: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 128  # of a step
    dtype: tl.constexpr = row_of_x.dtype.element_ty
    HAS_OFFSETS: tl.constexpr = offsets is not None or scales.dtype.element_ty == tl.int32
    SCALES_CODES: tl.constexpr = scales_codes(ROW_TILE, IS_FLOAT, dtype)
    BASE: tl.constexpr = base(dtype, BITS, IS_FULL, IS_FLOAT, CENTER, HAS_OFFSETS, SCALES_CODES)
    ADDS_X: tl.constexpr = (HAS_OFFSETS or BASE != -CENTER) and not SCALES_CODES
    # The tensor cores also add up x: as many rows of ones as there are in a tile for each warp.
    ONES: tl.constexpr = min(16 * NUM_WARPS, OUT_TILE)
    ones = tl.full([ONES, DEPTH], 1.0, tl.float32).to(dtype)
    inner = tl.arange(0, DEPTH)
    mask = None if has_out is None else has_out[:, None]
    sums = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        for block in tl.static_range(COLUMNS // (PLACES * DEPTH)):
            of_block = row_of_codes + step * (COLUMNS // PLACES) + block * DEPTH
            packed = load_codes(of_block, mask, OUT_TILE, DEPTH)
            for place in tl.static_range(PLACES):
                begin = step * COLUMNS + (block * PLACES + place) * DEPTH
                at = begin + inner
                has_x = has_row[None, :]
                if HAS_REST:
                    has_x = has_x & (at < in_features)[:, None]
                values = tl.load(row_of_x + at[:, None], has_x, other=0.0)
                if (block * PLACES + place) * DEPTH % GROUP == 0:
                    numbers = (begin // GROUP).to(tl.int64) * row_scales + out[:, None]
                    scale, low = load_numbers(scales, offsets, numbers, CENTER + BASE, mask)
                    group_sums = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
                    x_sums = tl.zeros([ONES, ROW_TILE], tl.float32)
                if SCALES_CODES:
                    factors = (scalable_codes(packed, place, BITS, BASE) * scale + low).to(dtype)
                    sums = tl.dot(factors, values, acc=sums)
                else:
                    factors = widened_codes(packed, dtype, place, BITS, IS_FULL, IS_FLOAT, BASE)
                    group_sums = tl.dot(factors, values, acc=group_sums, input_precision="ieee")
                    if ADDS_X:
                        x_sums = tl.dot(ones, values, acc=x_sums, input_precision="ieee")
                    if (block * PLACES + place + 1) * DEPTH % GROUP == 0:
                        sums += group_sums * scale
                        if ADDS_X:
                            x_sum = tl.broadcast_to(
                                x_sums[None, :, :], OUT_TILE // ONES, ONES, ROW_TILE
                            )
                            sums += tl.reshape(x_sum, OUT_TILE, ROW_TILE) * low
    return sums


@triton.jit(do_not_specialize=["rows", "steps"])
def _quantized_linear(
    x, codes, scales, offsets, bias, y, rows, out_features, in_features, row_codes, row_scales,
    steps, x_stride, y_stride, split_stride,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_FULL: tl.constexpr, GROUP: tl.constexpr,
    CENTER: tl.constexpr, DEPTH: tl.constexpr, RELU: tl.constexpr, HAS_REST: tl.constexpr,
    ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr, NUM_WARPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    out = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    has_row, has_out = row < rows, out < out_features
    row_of_x = x + row.to(tl.int64)[None, :] * x_stride
    row_of_codes = codes + out.to(tl.int64)[:, None] * row_codes
    first = tl.program_id(2) * steps
    last = tl.minimum(first + steps, row_codes // (8 * BITS))
    sums = sums_of_tile(
        row_of_x, has_row, row_of_codes, scales, offsets, out, None, in_features, row_scales,
        first, last, BITS, IS_FLOAT, IS_FULL, GROUP, CENTER, DEPTH, HAS_REST, ROW_TILE, OUT_TILE,
        NUM_WARPS, NUM_STAGES,
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
