"""Multiplies the rows of each group by the group's weight, in the rows' type or in INT8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.device import capability
from fastserve_kernels.gpu.int8_linear import sums_of_products
from fastserve_kernels.gpu.launch_parameters import cdiv, next_power_of_2


def variants(groups: int, dtype: torch.dtype, device: torch.device) -> list[int]:
    """Numbers of rows such that each compiles another variant of `grouped_linear`."""
    ways = launch_parameters.linear_ways(dtype.itemsize, capability(device))
    return [way.row_tile * groups for way in ways]


def grouped_linear(
    x: Tensor,
    starts: Tensor,
    rows: Tensor | None,
    weights: Tensor,
    scales: Tensor | None,
    biases: Tensor | None,
) -> Tensor:
    """See `GroupedLinear`. Products in x's dtype and sums in fp32, rounded once.

    x: [N, in], rows contiguous.
    weights: [groups, out, in], contiguous, of x's dtype, or int8 with scales.
    scales: [groups, out], contiguous, of any float dtype, or None.
    biases: [groups, out], contiguous, of x's dtype, or None.

    Returns a new contiguous tensor [R, out].
    Grid: (as many tiles of rows as there may be, tiles of out). Each program finds its own group,
    so the host need not know how many rows a group has.
    """
    count = len(x) if rows is None else len(rows)
    groups, out_features, in_features = weights.shape
    y = torch.empty((count, out_features), dtype=x.dtype, device=x.device)
    if count == 0 or groups == 0:
        return y
    if rows is None:  # rather than a second variant of the kernel
        rows = torch.arange(count, dtype=torch.int32, device=x.device)
    parameters = launch_parameters.linear(
        cdiv(count, groups), x.element_size(), capability(x.device)
    )
    tiles = min(count, count // parameters.row_tile + groups)
    _grouped_linear[(tiles, cdiv(out_features, parameters.out_tile))](
        x, starts, rows, weights, scales, biases, y, groups, out_features, in_features, x.stride(0),
        GROUPS=next_power_of_2(groups), ROW_TILE=parameters.row_tile, OUT_TILE=parameters.out_tile,
        IN_TILE=parameters.in_tile, num_warps=parameters.num_warps,
        num_stages=parameters.num_stages,
    )  # fmt: skip
    return y


@triton.jit
def rows_of_tile(starts, groups, tile, GROUPS: tl.constexpr, ROW_TILE: tl.constexpr):
    """The group that a tile of rows belongs to, `groups` for a tile past the last one; its rows,
    [ROW_TILE]; and which of them there are."""
    group_ids = tl.arange(0, GROUPS)
    inside = group_ids < groups
    counts = tl.load(starts + group_ids + 1, inside, other=0)
    counts -= tl.load(starts + group_ids, inside, other=0)
    # Tiles up to each group's last. The tile's group is the first with more than its number.
    tiles_until = tl.cumsum((counts + ROW_TILE - 1) // ROW_TILE, 0)
    is_before = tiles_until <= tile
    group = tl.sum(is_before.to(tl.int32), 0)
    tile_of_group = tile - tl.max(tl.where(is_before, tiles_until, 0), 0)
    # Past the last tile, the padding of groups counts too.
    begin = tl.load(starts + group, group < groups, other=0)
    end = tl.load(starts + group + 1, group < groups, other=0)
    row = begin + tile_of_group * ROW_TILE + tl.arange(0, ROW_TILE)
    return group, row, row < end


@triton.jit
def store_tile(sums, biases, row_of_weights, y, row, out, has_row, has_out, out_features):
    """Adds the biases to a tile's sums, [OUT_TILE, ROW_TILE], and stores them."""
    if biases is not None:
        sums += tl.load(biases + row_of_weights, has_out, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y + row.to(tl.int64)[None, :] * out_features + out[:, None],
        sums.to(y.dtype.element_ty), has_out[:, None] & has_row[None, :],
    )  # fmt: skip


# As in `_int8_linear`, the weight's tile is the first factor.
@triton.jit
def _grouped_linear(
    x, starts, rows, weights, scales, biases, y, groups, out_features, in_features, x_stride,
    GROUPS: tl.constexpr, ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr,
):  # fmt: skip
    group, row, has_row = rows_of_tile(starts, groups, tl.program_id(0), GROUPS, ROW_TILE)
    if group >= groups:
        return
    out = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    has_out = out < out_features
    of_x = x + tl.load(rows + row, has_row, other=0).to(tl.int64)[None, :] * x_stride
    row_of_weights = group.to(tl.int64) * out_features + out
    of_weights = weights + row_of_weights[:, None] * in_features
    sums = sums_of_products(
        of_weights, of_x, 0, in_features, in_features, has_out, has_row, IN_TILE
    )
    if scales is not None:
        sums *= tl.load(scales + row_of_weights, has_out, other=0.0).to(tl.float32)[:, None]
    store_tile(sums, biases, row_of_weights, y, row, out, has_row, has_out, out_features)
