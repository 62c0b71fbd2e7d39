"""Sums of the experts' results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.launch_parameters import cdiv
from fastserve_kernels.routes import Routes

# Elements for one program: 16 bytes of 16-bit values for each thread of 4 warps.
_BLOCK = 1024


def sum_choices(y: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """See `ops.sum_choices`. Grid: (T, blocks of n)."""
    tokens, choices = weights.shape
    size = y.shape[1]
    out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
    if tokens:
        _sum_choices[(tokens, cdiv(size, _BLOCK))](
            y, weights, routes.places, routes.starts, out, len(routes.starts) - 1, size,
            CHOICES=choices, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _sum_choices(
    y, weights, places, starts, out, experts, size, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    end = tl.load(starts + experts)
    sums = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        row = y + place.to(tl.int64) * size
        values = tl.load(row + columns, inside & (place < end), other=0.0).to(tl.float32)
        sums += values * tl.load(weights + token * CHOICES + choice)
    tl.store(out + token * size + columns, sums, inside)
