from __future__ import annotations

import pytest
import torch
from triton import knobs


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where launchers run: Triton's interpreter takes tensors on the CPU."""
    return torch.device("cpu" if knobs.runtime.interpret else "cuda")
