"""Products whose columns are divided among programs: how many, and the sum of their parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.dependent_launch import (
    launch_dependents,
    launch_options,
    wait_for_earlier,
)
from fastserve_kernels.gpu.device import multiprocessors
from fastserve_kernels.gpu.launch_parameters import cdiv

# A program has at least so many steps, as its loads take three to get going.
_FEWEST_STEPS = 4
_TILE = 1024


def steps_of_split(tiles: int, steps: int, programs: int, device: torch.device) -> int:
    """How many of a tile's steps each of its programs takes, so that multiprocessors run about
    `programs` at once, and have about the same number of steps each.

    tiles: of the weight's rows. Tiles of x do not count, so that a layer's variants do not depend
        on how many there are.
    """
    count = multiprocessors(device)
    fit = programs * count // tiles
    # Where one fits, two may fit on most multiprocessors. With more than fit, some would wait.
    most = max(1, min(2 if fit == 1 else fit, steps // _FEWEST_STEPS))
    choices = range(cdiv(most, 2), most + 1)
    splits = min(choices, key=lambda splits: cdiv(tiles * splits, count) / splits)
    return max(1, cdiv(steps, splits))


def empty_sums(splits: int, rows: int, out_features: int, device: torch.device) -> Tensor:
    """float32 [splits, rows, out]. `rows`: of whole tiles, so that the kernels' alignment does not
    depend on the number of rows."""
    return torch.empty((splits, rows, out_features), dtype=torch.float32, device=device)


def add_splits(sums: Tensor, bias: Tensor | None, relu: bool, y: Tensor) -> None:
    """y = the sum of all splits + bias. y: [T, out]. Grid: (T, tiles of out)."""
    rows, out_features = y.shape
    _add_splits[(rows, cdiv(out_features, _TILE))](
        sums, bias, y, len(sums), out_features, sums.stride(0), y.stride(0),
        RELU=relu, TILE=_TILE, num_warps=4, **launch_options(y.device),
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
