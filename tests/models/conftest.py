from __future__ import annotations

from collections.abc import Iterator

import pytest
from cpu_kernels import compiled_kernels as _compiled_kernels
from torch_threads import torch_threads


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    """For models this small, more would wait for each other."""
    with torch_threads(2):
        yield


@pytest.fixture
def compiled_kernels() -> Iterator[None]:
    with _compiled_kernels():
        yield
