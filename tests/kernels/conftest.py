"""Fixtures: both CPU implementations, one at a time, and their error limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cpu_kernels import same_kernels_afterwards
from fastserve_kernels import ops
from kernel_cases import near
from torch import Tensor

TIMEOUT_S = 900
"""Any test may be the first one, which compiles the kernels."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "EMULATED_GPU" in os.environ:
        return  # the Makefile gives them more: they have the least priority
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(autouse=True)
def _same_kernels_afterwards() -> Iterator[None]:
    with same_kernels_afterwards():
        yield


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    ops.set_cpu_backend(request.param)
    choice: str = request.param
    return choice


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
