"""Multiplies the rows of each group by the group's weight of few bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.device import capability
from fastserve_kernels.gpu.grouped_linear import (
    grouped_linear,
    rows_of_tile,
    store_tile,
)
from fastserve_kernels.gpu.launch_parameters import cdiv, next_power_of_2
from fastserve_kernels.gpu.packed_weight import COLUMNS_MULTIPLE, PackedWeight
from fastserve_kernels.gpu.quantized_linear import MOST_ROWS, sums_of_tile


def variants(groups: int, dtype: torch.dtype, device: torch.device) -> list[int]:
    """Numbers of rows such that each compiles other variants of `grouped_quantized_linear`."""
    ways = launch_parameters.quantized_ways(dtype.itemsize, capability(device))
    return [groups * rows for rows in (*(way.row_tile for way in ways), MOST_ROWS + 1)]


def grouped_quantized_linear(
    x: Tensor,
    starts: Tensor,
    rows: Tensor | None,
    weight: PackedWeight,
    biases: Tensor | None,
    groups: int,
) -> Tensor:
    """See `GroupedLinear`. Products and sums as those of `quantized_linear`.

    x: [N, in], rows contiguous.
    weight: of all groups, one below the other: [groups · out, in].
    biases: [groups, out], contiguous, of x's dtype, or None.

    Returns a new contiguous tensor [R, out].
    Grid: as that of `grouped_linear`. With more than `MOST_ROWS` rows a group on average, the
    weight is dequantized in memory.
    """
    count = len(x) if rows is None else len(rows)
    out_features, in_features = weight.out_features // groups, weight.in_features
    if cdiv(count, groups) > MOST_ROWS:
        table = weight.dequantized(x.dtype, slice(0, weight.out_features))
        weights = table.view(groups, out_features, in_features)
        return grouped_linear(x, starts, rows, weights, None, biases)
    y = torch.empty((count, out_features), dtype=x.dtype, device=x.device)
    if count == 0:
        return y
    if rows is None:  # rather than a second variant of the kernel
        rows = torch.arange(count, dtype=torch.int32, device=x.device)
    parameters = launch_parameters.quantized_linear(
        cdiv(count, groups), x.element_size(), capability(x.device), weight.layout.is_float
    )
    tiles = min(count, count // parameters.row_tile + groups)
    _grouped_quantized_linear[(tiles, cdiv(out_features, parameters.out_tile))](
        x, starts, rows, weight.codes, weight.scales, weight.offsets, biases, y,
        groups, out_features, in_features, weight.codes.shape[1], weight.scales.shape[1],
        x.stride(0), **weight.layout.constants, HAS_REST=in_features % COLUMNS_MULTIPLE > 0,
        GROUPS=next_power_of_2(groups), ROW_TILE=parameters.row_tile, OUT_TILE=parameters.out_tile,
        NUM_WARPS=parameters.num_warps, NUM_STAGES=parameters.num_stages,
        num_warps=parameters.num_warps, num_stages=parameters.num_stages,
    )  # fmt: skip
    return y


@triton.jit
def _grouped_quantized_linear(
    x, starts, rows, codes, scales, offsets, biases, y, groups, out_features, in_features,
    row_codes, row_scales, x_stride,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_FULL: tl.constexpr, GROUP: tl.constexpr,
    CENTER: tl.constexpr, DEPTH: tl.constexpr, HAS_REST: tl.constexpr, GROUPS: tl.constexpr,
    ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr, NUM_WARPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    group, row, has_row = rows_of_tile(starts, groups, tl.program_id(0), GROUPS, ROW_TILE)
    if group >= groups:
        return
    out = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    has_out = out < out_features
    row_of_x = x + tl.load(rows + row, has_row, other=0).to(tl.int64)[None, :] * x_stride
    row_of_weight = group.to(tl.int64) * out_features + out
    sums = sums_of_tile(
        row_of_x, has_row, codes + row_of_weight[:, None] * row_codes, scales, offsets,
        row_of_weight, has_out, in_features, row_scales, 0, row_codes // (8 * BITS),
        BITS, IS_FLOAT, IS_FULL, GROUP, CENTER, DEPTH, HAS_REST, ROW_TILE, OUT_TILE,
        NUM_WARPS, NUM_STAGES,
    )  # fmt: skip
    store_tile(sums, biases, row_of_weight, y, row, out, has_row, has_out, out_features)
