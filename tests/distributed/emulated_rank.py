"""A whole rank, with all threads, on an emulated GPU. Gloo takes NCCL's place."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import Any

import ptx.driver

if __name__ == "__main__":
    ptx.driver.install(os.environ[ptx.driver.VARIABLE])  # before the kernels are imported

import pytest
import torch
import torch.distributed as dist
from emulated_gpu import DeviceTensor, EmulatedGPU
from fastserve_backend.worker.__main__ import main
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

MEMORY = 1 << 30
"""The GPU's memory in bytes. It always counts as free."""


def run() -> int:
    """Runs the rank on this thread and on those that it starts."""
    gpu = EmulatedGPU(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    monkeypatch = pytest.MonkeyPatch()
    gpu.install(monkeypatch)
    for name, value in {
        "is_available": True,
        "device_count": int(os.environ["LOCAL_WORLD_SIZE"]),
        "get_device_name": "emulated",
        "mem_get_info": (MEMORY, MEMORY),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("all_reduce", "broadcast", "gather", "isend", "recv"):
        monkeypatch.setattr(dist, name, partial(_communicate, gpu, getattr(dist, name)))
    monkeypatch.setattr(dist, "init_process_group", partial(_by_gloo, dist.init_process_group))
    run_thread = threading.Thread.run

    def run_on_gpu(thread: threading.Thread) -> None:
        with torch.inference_mode(), EmulatedGPU(gpu.device, gpu.pinned, gpu.registered):
            run_thread(thread)

    monkeypatch.setattr(threading.Thread, "run", run_on_gpu)
    with torch.inference_mode(), gpu:
        return main()


def _communicate(gpu: EmulatedGPU, collective: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a communication. Within a capture it becomes a part of the graph."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    args, kwargs = tree_map_only(DeviceTensor, lambda tensor: tensor.on_host, (args, kwargs))

    def operation() -> Any:
        with _disable_current_modes():
            return collective(*args, **kwargs)

    return gpu.execute(operation, tensors)


def _by_gloo(init_process_group: Any, backend: str, **kwargs: Any) -> None:
    assert backend == "nccl"
    init_process_group("gloo", **kwargs)


if __name__ == "__main__":
    sys.exit(run())
