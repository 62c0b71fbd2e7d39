"""Fixtures: both CPU implementations, one at a time, and their error limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fastserve_kernels import ops
from kernel_cases import near
from torch import Tensor


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
        comparison = near("result", actual, expected, actual.dtype)
        assert comparison.error <= comparison.limit

    return check
