"""Sorts the tokens' choices of experts, in one launch where a decode has few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.cpu import plain_torch
from fastserve_kernels.gpu.launch_parameters import next_power_of_2
from fastserve_kernels.routes import Routes

_MOST_ROWS = 2048
"""An estimate: for more choices the only program would take longer than torch's dozen launches."""
# Pairs of an expert and a choice that are compared at a time: 16 for each thread of 8 warps.
_PAIRS, _NUM_WARPS = 4096, 8
_MOST_AT_A_TIME = 128


def sort_choices(experts: Tensor, first: int, count: int) -> Routes:
    """See `ops.sort_choices`. Grid: one program, except for many choices, which torch sorts."""
    rows = experts.numel()
    if rows > _MOST_ROWS:
        return plain_torch.sort_choices(experts, first, count)
    tokens, starts, places = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((rows,), (count + 1,), experts.shape)
    )
    groups = next_power_of_2(count + 1)
    _sort_choices[(1,)](
        experts, tokens, starts, places, rows, first, count,
        CHOICES=experts.shape[1], GROUPS=groups,
        BLOCK=min(_MOST_AT_A_TIME, max(1, _PAIRS // groups)), num_warps=_NUM_WARPS,
    )  # fmt: skip
    return Routes(tokens, starts, places)


# Choices of experts that are not here are group `count`, the last.
@triton.jit(do_not_specialize=["rows", "first"])
def _sort_choices(
    experts, tokens, starts, places, rows, first, count,
    CHOICES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    groups = tl.arange(0, GROUPS)
    counts = tl.zeros([GROUPS], tl.int32)
    for start in range(0, rows, BLOCK):
        is_of_group = _is_of_group(experts, start, rows, first, count, GROUPS, BLOCK)
        counts += tl.sum(is_of_group, 1)
    next_rows = tl.cumsum(counts, 0) - counts
    tl.store(starts + groups, next_rows, groups <= count)
    for start in range(0, rows, BLOCK):
        is_of_group = _is_of_group(experts, start, rows, first, count, GROUPS, BLOCK)
        before = tl.cumsum(is_of_group, 1) - is_of_group
        place = tl.sum(is_of_group * (next_rows[:, None] + before), 0)
        row = start + tl.arange(0, BLOCK)
        tl.store(places + row, place, row < rows)
        tl.store(tokens + place, row // CHOICES, row < rows)
        next_rows += tl.sum(is_of_group, 1)


@triton.jit
def _is_of_group(experts, start, rows, first, count, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [GROUPS, BLOCK], 1 or 0. Past the last row there is no group."""
    row = start + tl.arange(0, BLOCK)
    group = tl.load(experts + row, row < rows, other=0).to(tl.int32) - first
    group = tl.where((group < 0) | (group >= count), count, group)
    group = tl.where(row < rows, group, GROUPS)
    return (tl.arange(0, GROUPS)[:, None] == group[None, :]).to(tl.int32)
