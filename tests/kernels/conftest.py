"""Both CPU implementations, one at a time, and the limits they are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fastserve_kernels import ops
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Largest error allowed, relative to the largest value of the expected result."""


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_cpu_backend(request.param)
    yield request.param
    ops.set_cpu_backend("auto")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def close() -> Callable[[Tensor, Tensor], None]:
    """Asserts that a result is within its dtype's limit of the float64 expectation."""

    def check(actual: Tensor, expected: Tensor) -> None:
        assert actual.shape == expected.shape
        if not actual.numel():
            return
        error = (actual.double() - expected.double()).abs().max()
        scale = expected.double().abs().max().clamp_min(1e-30)
        assert error / scale <= LIMITS[actual.dtype], f"relative error {error / scale:.2e}"

    return check
