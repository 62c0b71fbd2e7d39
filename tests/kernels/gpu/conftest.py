"""Fixtures: the device of the GPU's kernels, and their machine code for absent GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import ptx.driver
import pytest
import torch
from ahead_of_time import CompiledKernel, Launch, compile_launches
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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "compiles(launches): the launches whose `kernels` a test reads, a function of some of its "
        "parameters",
    )


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, list[CompiledKernel]]:
    """The kernels of each launch of the module's tests that were selected. One process compiles all
    those of an architecture."""
    launches = {
        str(launch): launch
        for item in request.session.items
        if item.path == request.path
        for launch in _launches(item)
    }
    return dict(zip(launches, compile_launches([*launches.values()]), strict=True))


@pytest.fixture
def kernels(
    request: pytest.FixtureRequest, compiled: dict[str, list[CompiledKernel]]
) -> list[CompiledKernel]:
    """Those of the test's launches, one after the other."""
    return [kernel for launch in _launches(request.node) for kernel in compiled[str(launch)]]


def _launches(item: pytest.Item) -> list[Launch]:
    mark = item.get_closest_marker("compiles")
    if mark is None:
        return []
    (launches,) = mark.args
    callspec = getattr(item, "callspec", None)
    return list(
        launches(*(callspec.params[name] for name in inspect.signature(launches).parameters))
    )
