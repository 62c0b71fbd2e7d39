"""Programmatic dependent launch: a kernel starts while the one before it in its stream still runs.

It exists from compute capability 9.0 on, if the compiler has it; others report that graphs with it
cannot be captured on 12.0. A kernel that is launched with
`launch_options` may start when all programs of the kernel before have called `launch_dependents` or
have ended. So its own start, its index arithmetic and its loads of parameters cost no time.

Rules, which the emulator of the tests checks:

- Every program calls `wait_for_earlier`, which waits until the kernel before has ended and its
  stores are visible. That kernel ended after its own wait. So this holds for all kernels before.
- Before it a program may load what no kernel writes while serving, such as a weight of a norm.
  Nothing else may be loaded, and nothing stored: the kernel before may still read or write it.
- A kernel without these options starts when all kernels before it have ended, and need not wait.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.compiler import CUDAOptions
from triton.language.extra import cuda

from fastserve_kernels.gpu.device import capability

_COMPILER_HAS_IT = hasattr(cuda, "gdc_wait") and hasattr(CUDAOptions, "launch_pdl")
_gdc_wait: Any = getattr(cuda, "gdc_wait", None)
_gdc_launch_dependents: Any = getattr(cuda, "gdc_launch_dependents", None)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Options of the launch of a kernel on this device that waits as above: its parameter PDL, and
    what the launch takes."""
    if (
        not _COMPILER_HAS_IT
        or knobs.runtime.interpret
        or device.type == "cpu"
        or not (9, 0) <= capability(device) < (12, 0)
    ):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Wait until all earlier kernels of the stream have ended."""
    if PDL:
        _gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start when all programs have come here. It still waits for their ends."""
    if PDL:
        _gdc_launch_dependents()
