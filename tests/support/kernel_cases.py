"""A case of a kernel: a run on a device, and its expected results."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from fastserve_kernels.int8_cache import SCALE_BYTES, codes_and_scales, quantize_tokens
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Largest error, relative to the largest value expected."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAN = float("nan")


@dataclass(frozen=True)
class Comparison:
    """A result and its expectation, both on the CPU."""

    what: str
    actual: Tensor
    expected: Tensor
    limit: float = 0.0
    """Limit of `error`; 0 means equal values."""

    @property
    def error(self) -> float:
        """The largest error, relative to the largest value expected; infinite for another shape, or
        where only one of both has a NaN."""
        if self.actual.shape != self.expected.shape:
            return float("inf")
        actual, expected = self.actual.double(), self.expected.double()
        if not torch.equal(actual.isnan(), expected.isnan()):
            return float("inf")
        actual, expected = actual.nan_to_num(0.0), expected.nan_to_num(0.0)
        error = (actual - expected).abs().amax() if actual.numel() else torch.zeros(())
        return float(error / expected.abs().amax()) if error else 0.0


def in_int8(kv: Tensor) -> Tensor:
    """A cache's tokens as codes and scales (see `int8_cache`). The scales hold the NaN."""
    rounded = torch.empty(*kv.shape[:-1], kv.shape[-1] + SCALE_BYTES, dtype=torch.int8)
    for place, part in zip(codes_and_scales(rounded), quantize_tokens(kv), strict=True):
        place.copy_(part)
    return rounded


def near(what: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Comparison:
    """Compares a result of this dtype within the dtype's limit."""
    assert actual.dtype == dtype, f"{what}: {actual.dtype} instead of {dtype}"
    return Comparison(what, actual, expected, LIMITS[dtype])


@dataclass(frozen=True)
class Case:
    operation: str
    arguments: tuple[object, ...]
    compare: Callable[..., Iterator[Comparison]]
    """Runs the kernel, called with the arguments and a device."""
    label: str = ""
    """Distinguishes cases with equal arguments."""

    def __str__(self) -> str:
        parts = (str(part).removeprefix("torch.") for part in self.arguments)
        return "-".join(filter(None, (self.operation, *parts, self.label)))

    def run(self, device: torch.device) -> Iterator[Comparison]:
        """Runs the case with the same inputs on every device."""
        torch.manual_seed(zlib.crc32(str(self).encode()))
        return self.compare(*self.arguments, device)
