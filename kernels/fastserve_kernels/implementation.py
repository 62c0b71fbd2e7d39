"""Which implementation runs an operation: chosen by the device and dtype of its tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastserve_kernels.cpu import plain_torch
from fastserve_kernels.cpu.backend import compiled_for, cpu_backend


class Kernels(Protocol):
    """The operations that every implementation has; `ops` describes them."""

    def kv_write(
        self, kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor
    ) -> None: ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, x: Tensor) -> Tensor: ...


def kernels_for(tensor: Tensor) -> Kernels:
    """The fastest implementation for tensors like this one."""
    if uses_triton(tensor.device):
        # Needs Triton, which only a GPU needs.
        from fastserve_kernels.gpu import kernels

        return kernels
    return compiled_for(tensor) or plain_torch


def uses_triton(device: torch.device) -> bool:
    """Whether the Triton-language kernels run on this device: any GPU, or their interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and cpu_backend() == "triton")
