"""Keeps a test's choice of the CPU's kernels to the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastserve_kernels import ops


@contextmanager
def same_kernels_afterwards() -> Iterator[None]:
    """The process then runs the kernels of before again, such as those of FASTSERVE_CPU_KERNELS."""
    before = ops.cpu_backend()
    try:
        yield
    finally:
        if ops.cpu_backend() != before:
            ops.set_cpu_backend(before)


@contextmanager
def compiled_kernels() -> Iterator[None]:
    """For what plain torch does not have: recorded programs, and weights of few bits in memory."""
    with same_kernels_afterwards():
        ops.set_cpu_backend("compiled")
        yield
