"""Chooses the implementation of an operation, by the device and dtype of its tensors.

For a CPU there are several. Each process decides on one of them when it first needs it.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from fastserve_kernels.cpu import plain_torch
from fastserve_kernels.cpu.builder import BuildError
from fastserve_kernels.cpu.compiled import CompiledKernels

logger = logging.getLogger(__name__)

CpuBackend = Literal["compiled", "torch", "triton"]
COMPILED_DTYPES = frozenset((torch.float32, torch.bfloat16))
CHOICE_VARIABLE = "FASTSERVE_CPU_KERNELS"


class _State:
    """The process-wide decision; `backend` is None until the first operation needs it."""

    backend: CpuBackend | None = None
    kernels: CompiledKernels | None = None


def set_cpu_backend(choice: Literal["auto", "compiled", "torch", "triton"]) -> CpuBackend:
    """Choose the CPU implementation. Returns the one now in use.

    - "auto" compiles the kernels, or falls back to plain torch with a logged warning.
    - "compiled" compiles them, and raises BuildError if that fails.
    - "torch" is plain torch.
    - "triton" runs the GPU's kernels in Triton's interpreter, thousands of times slower. It is for
      tests and needs TRITON_INTERPRET=1 in the environment.

    A PackedLinear or Int8Linear keeps the implementation that it was built with.

    Raises:
        ValueError: any other choice, or "triton" without that variable.
    """
    if choice not in ("auto", "compiled", "torch", "triton"):
        raise ValueError(f"CPU kernels {choice!r}: use 'auto', 'compiled', 'torch' or 'triton'")
    if choice == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("CPU kernels 'triton': they need TRITON_INTERPRET=1 in the environment")
    _State.kernels = _compiled(choice) if choice in ("auto", "compiled") else None
    if choice == "triton":
        _State.backend = "triton"
    else:
        _State.backend = "torch" if _State.kernels is None else "compiled"
    return _State.backend


def _compiled(choice: str) -> CompiledKernels | None:
    try:
        return CompiledKernels.load()
    except BuildError as error:
        if choice == "compiled":
            raise
        logger.warning("CPU kernels run in plain torch, which is much slower: %s", error)
        return None


def cpu_backend() -> CpuBackend:
    """The CPU implementation in use: "compiled" C++, plain "torch", or interpreted "triton".

    The first call decides by the environment variable FASTSERVE_CPU_KERNELS (default "auto", see
    `set_cpu_backend`), and compiles if the cache is empty.
    """
    if _State.backend is None:
        return set_cpu_backend(os.environ.get(CHOICE_VARIABLE, "auto"))  # type: ignore[arg-type]
    return _State.backend


def uses_triton(device: torch.device) -> bool:
    """Whether Triton-language kernels run for this device: on any GPU, or interpreted on a CPU."""
    return device.type == "cuda" or (device.type == "cpu" and cpu_backend() == "triton")


def kernels_for(tensor: Tensor) -> CompiledKernels | ModuleType:
    """The fastest implementation for tensors like this one, of operations that all have."""
    if uses_triton(tensor.device):
        # Imported on use: it needs Triton, which only a GPU needs.
        from fastserve_kernels.gpu import kernels

        return kernels
    return compiled_for(tensor) or plain_torch


def compiled_for(tensor: Tensor) -> CompiledKernels | None:
    """The compiled kernels if they support this tensor's device and dtype, else None."""
    return compiled_on(tensor.device) if tensor.dtype in COMPILED_DTYPES else None


def compiled_on(device: torch.device) -> CompiledKernels | None:
    """The same for tensors whose dtype is always the same."""
    if device.type != "cpu":
        return None
    cpu_backend()
    return _State.kernels


def thread_ids() -> list[int]:
    """Linux's ids of the threads that run the calling thread's operations on a CPU, if they are
    compiled; else none is known."""
    cpu_backend()
    return [] if _State.kernels is None else _State.kernels.thread_ids()
