"""Fixtures: the real encoder, and torch with one thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fastserve_backend.length_prediction.encoder import Encoder
from torch_threads import torch_threads


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The predictor's process uses one thread, too."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)
