"""The most that this machine can do, measured in the same run as the figures beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.check_device import Device, Timing

COPY_BYTES = 4 * 10**9
LINK_BYTES = 10**9
GEMM_SIZE = 8192
_DRY_RUN_BYTES = 2**16
_DRY_RUN_GEMM = 64
_LINK_REPEATS = 5


def copy_rate(device: Device) -> tuple[float, Timing]:
    """Bytes a second of a copy within device memory (read + written), and its time."""
    num_bytes = _DRY_RUN_BYTES if device.is_dry_run else COPY_BYTES
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    timing = device.time([lambda: target.copy_(source)])
    return 2 * num_bytes / timing.seconds, timing


def read_rate(device: Device) -> tuple[float, Timing]:
    """Bytes a second of a sum over device memory, nearly all of them read, and its time."""
    num_bytes = _DRY_RUN_BYTES if device.is_dry_run else COPY_BYTES
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device.torch_device)
    timing = device.time([lambda: source.sum()])
    return num_bytes / timing.seconds, timing


def gemm_rate(device: Device) -> tuple[float, Timing]:
    """Floating-point operations a second of a square bfloat16 product of random matrices."""
    size = _DRY_RUN_GEMM if device.is_dry_run else GEMM_SIZE
    left, right = (
        torch.randn(size, size, device=device.torch_device, dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(left)
    timing = device.time([lambda: torch.mm(left, right, out=out)])
    return 2 * size**3 / timing.seconds, timing


def link_rates(device: Device) -> dict[str, float]:
    """Bytes a second of pinned copies from the device ("out"), to it ("in") and of both at once."""
    num_bytes = _DRY_RUN_BYTES if device.is_dry_run else LINK_BYTES
    on_device = [
        torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device.torch_device)
        for _ in range(2)
    ]
    on_host = [device.host_memory(num_bytes) for _ in range(2)]
    for memory in on_host:
        memory.fill_(7)

    def copy_out() -> None:
        on_host[0].copy_(on_device[0], non_blocking=True)

    def copy_in() -> None:
        on_device[1].copy_(on_host[1], non_blocking=True)

    streams = {copy: device.stream() for copy in (copy_out, copy_in)}

    def seconds(*copies: Callable[[], None]) -> float:
        """Time of the fastest repeat, because a ceiling is wanted."""
        fastest = float("inf")
        for _ in range(_LINK_REPEATS):
            device.synchronize()
            started = time.perf_counter()
            for copy in copies:
                with streams[copy]:
                    copy()
            device.synchronize()
            fastest = min(fastest, time.perf_counter() - started)
        return fastest

    return {
        "out": num_bytes / seconds(copy_out),
        "in": num_bytes / seconds(copy_in),
        "both": 2 * num_bytes / seconds(copy_out, copy_in),
    }
