from __future__ import annotations

from collections.abc import Iterator

import ptx.driver
import pytest
import torch
from emulated_gpu import DEVICE, emulated_gpu
from fastserve_kernels import ops
from triton import knobs


@pytest.fixture
def kernel_device() -> Iterator[torch.device]:
    """The device of the GPU's kernels, those of `ops` included: a GPU, an emulated one, or the CPU
    for Triton's interpreter."""
    if ptx.driver.capability() is not None:
        with emulated_gpu():
            yield DEVICE
        return
    if not knobs.runtime.interpret:
        yield torch.device("cuda")
        return
    ops.set_cpu_backend("triton")
    yield torch.device("cpu")
