"""The real encoder and, where meaning does not matter, random embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fastserve_backend.length_prediction.encoder import Encoder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the predictor's process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)
