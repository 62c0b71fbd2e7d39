"""Multiplies rows by a weight in INT8, which is widened in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.dense_linear import widened_linear
from fastserve_kernels.gpu.device import capability
from fastserve_kernels.gpu.launch_parameters import cdiv
from fastserve_kernels.gpu.split_sums import add_splits, empty_sums, steps_of_split
from fastserve_kernels.gpu.widened_codes import after_product, widened_bytes

MOST_ROWS = 384
"""With more rows it takes less time to widen the weight in memory, for torch's product."""


def variants(dtype: torch.dtype, device: torch.device) -> list[int]:
    """Numbers of rows such that each compiles another variant of `int8_linear` for this dtype."""
    ways = launch_parameters.linear_ways(dtype.itemsize, capability(device))
    return [way.row_tile for way in ways]


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """x @ (codes * scale[:, None]).T + bias, with products in x's dtype and sums in fp32, rounded
    once.

    x: [T, in], rows contiguous.
    codes: int8 [out, in], contiguous.
    scale: [out] of any float dtype.
    bias: [out] of x's dtype, or None.

    Returns a new contiguous tensor [T, out].
    Grid: (tiles of T, tiles of out, splits of the columns). Neighbouring programs read the same
    codes. With several splits, a second kernel adds up their sums. More than `MOST_ROWS` rows are
    multiplied by torch, with codes * scale rounded to x's dtype.
    """
    rows, size = x.shape
    out_features = codes.shape[0]
    y = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    if rows > MOST_ROWS:
        widened_linear(x, lambda part: _widened(codes[part], scale[part], x.dtype), bias, relu, y)
        return y
    parameters = launch_parameters.linear(rows, x.element_size(), capability(x.device))
    row_tiles, out_tiles = cdiv(rows, parameters.row_tile), cdiv(out_features, parameters.out_tile)
    steps = cdiv(size, parameters.in_tile)
    columns = parameters.in_tile * steps_of_split(
        out_tiles, steps, parameters.programs_per_multiprocessor, x.device
    )
    splits = max(1, cdiv(size, columns))
    sums = y
    if splits > 1:
        sums = empty_sums(splits, row_tiles * parameters.row_tile, out_features, y.device)
    _int8_linear[(row_tiles, out_tiles, splits)](
        x, codes, scale, bias if splits == 1 else None, sums,
        rows, out_features, size, columns, x.stride(0), sums.stride(0), RELU=relu and splits == 1,
        ROW_TILE=parameters.row_tile, OUT_TILE=parameters.out_tile, IN_TILE=parameters.in_tile,
        num_warps=parameters.num_warps, num_stages=parameters.num_stages,
    )  # fmt: skip
    if splits > 1:
        add_splits(sums, bias, relu, y)
    return y


def _widened(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(codes, scale[:, None]).to(dtype)


@triton.jit
def sums_of_products(
    row_of_weights, row_of_x, first, end, in_features, has_out, has_row, IN_TILE: tl.constexpr
):  # fmt: skip
    """float32 [OUT_TILE, ROW_TILE]: the products of a tile of the weight with one of x, summed over
    the columns from first to end.

    row_of_weights: [OUT_TILE, 1], where each row of the weight begins. row_of_x: [1, ROW_TILE].
    """
    sums = tl.zeros([has_out.shape[0], has_row.shape[0]], tl.float32)
    for start in range(first, end, IN_TILE):
        at = start + tl.arange(0, IN_TILE)
        inside = at < in_features
        weight = tl.load(row_of_weights + at[None, :], has_out[:, None] & inside[None, :], other=0)
        values = tl.load(row_of_x + at[:, None], inside[:, None] & has_row[None, :], other=0.0)
        factors = widened_bytes(weight, values.dtype)
        sums = after_product(tl.dot(factors, values, acc=sums, input_precision="ieee"))
    return sums


# The weight's tile is the first factor. Tensor cores take that one from registers, where the codes
# are widened, and the second factor may have as few as 8 rows.
@triton.jit(do_not_specialize=["rows"])
def _int8_linear(
    x, codes, scale, bias, y, rows, out_features, in_features, columns, x_stride, split_stride,
    RELU: tl.constexpr, ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    out = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    has_row, has_out = row < rows, out < out_features
    row_of_x = x + row.to(tl.int64)[None, :] * x_stride
    row_of_codes = codes + out.to(tl.int64)[:, None] * in_features
    first = tl.program_id(2) * columns
    sums = sums_of_products(
        row_of_codes, row_of_x, first, tl.minimum(first + columns, in_features), in_features,
        has_out, has_row, IN_TILE,
    )  # fmt: skip
    sums *= tl.load(scale + out, has_out, other=0.0).to(tl.float32)[:, None]
    if bias is not None:
        sums += tl.load(bias + out, has_out, other=0.0).to(tl.float32)[:, None]
    if RELU:
        sums = tl.maximum(sums, 0.0, tl.PropagateNan.ALL)
    y += tl.program_id(2).to(tl.int64) * split_stride
    tl.store(
        y + row.to(tl.int64)[None, :] * out_features + out[:, None],
        sums.to(y.dtype.element_ty), has_out[:, None] & has_row[None, :],
    )  # fmt: skip
