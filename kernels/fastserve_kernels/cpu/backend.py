"""Which CPU implementation is in use: decided once a process, on first need."""

from __future__ import annotations

import logging
import os
from typing import Literal

import torch

from fastserve_kernels.cpu.builder import BuildError
from fastserve_kernels.cpu.compiled import CompiledKernels

logger = logging.getLogger(__name__)

CpuBackend = Literal["compiled", "torch"]
COMPILED_DTYPES = frozenset((torch.float32, torch.bfloat16))
CHOICE_VARIABLE = "FASTSERVE_CPU_KERNELS"


class _State:
    """The process-wide decision; `decided` is False until the first operation needs it."""

    decided = False
    kernels: CompiledKernels | None = None


def set_cpu_backend(choice: Literal["auto", "compiled", "torch"]) -> CpuBackend:
    """Chooses the CPU implementation and returns the one now in use.

    "auto" compiles, and falls back to plain torch with a logged warning; "compiled" raises
    BuildError instead of falling back. A PackedLinear keeps what it was built with.

    Raises ValueError for any other choice.
    """
    if choice not in ("auto", "compiled", "torch"):
        raise ValueError(f"CPU kernels {choice!r}: use 'auto', 'compiled' or 'torch'")
    kernels = None
    if choice != "torch":
        try:
            kernels = CompiledKernels.load()
        except BuildError as error:
            if choice == "compiled":
                raise
            logger.warning("CPU kernels run in plain torch, which is much slower: %s", error)
    _State.kernels, _State.decided = kernels, True
    return "torch" if kernels is None else "compiled"


def cpu_backend() -> CpuBackend:
    """The CPU implementation in use: "compiled" C++ or plain "torch".

    The first call decides, by the environment variable FASTSERVE_CPU_KERNELS ("auto" unless set,
    see `set_cpu_backend`), and compiles if the cache is empty.
    """
    if not _State.decided:
        return set_cpu_backend(os.environ.get(CHOICE_VARIABLE, "auto"))  # type: ignore[arg-type]
    return "torch" if _State.kernels is None else "compiled"


def compiled_for(tensor: torch.Tensor) -> CompiledKernels | None:
    """The compiled kernels if they serve this tensor's device and dtype."""
    if not tensor.is_cpu or tensor.dtype not in COMPILED_DTYPES:
        return None
    if not _State.decided:
        cpu_backend()
    return _State.kernels
