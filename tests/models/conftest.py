from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_kernels import compiled_kernels as _compiled_kernels
from fastserve_backend.checkpoints import load_config
from fastserve_backend.checkpoints.gguf_index import INDEX_FILE
from fastserve_backend.models import loader
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


@pytest.fixture(scope="module")
def conversions_anywhere() -> Iterator[None]:
    """Converted GGUF files count wherever a test has put them, not only in the user's cache."""

    def has_index(directory: Path) -> bool:
        return (directory / INDEX_FILE).is_file()

    with pytest.MonkeyPatch.context() as patch:
        for module in (load_config, loader):
            patch.setattr(module, "is_conversion", has_index)
        yield
