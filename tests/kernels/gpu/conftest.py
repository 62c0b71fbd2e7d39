from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fastserve_kernels import ops
from triton import knobs


@pytest.fixture
def kernel_device() -> Iterator[torch.device]:
    """Where the GPU's kernels run, `ops` included: on a GPU, or in Triton's interpreter, which
    takes tensors on the CPU."""
    if not knobs.runtime.interpret:
        yield torch.device("cuda")
        return
    ops.set_cpu_backend("triton")
    yield torch.device("cpu")
    ops.set_cpu_backend("auto")
