"""Launches for `ahead_of_time`: each calls a launcher as a model step or a swap does."""

from __future__ import annotations

import torch
from fastserve_kernels.gpu import activations


def bias_relu(dtype: torch.dtype, size: int) -> None:
    activations.bias_relu(
        torch.empty(16, size, dtype=dtype, device="meta"),
        torch.empty(size, dtype=dtype, device="meta"),
    )


def silu_mul(dtype: torch.dtype, size: int) -> None:
    activations.silu_mul(torch.empty(16, 2 * size, dtype=dtype, device="meta"))
