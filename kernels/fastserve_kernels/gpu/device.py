"""Properties of the device for the launchers, looked up once in a process."""

from __future__ import annotations

from functools import lru_cache

import torch

INTERPRETED_CAPABILITY = (9, 0)
INTERPRETED_MULTIPROCESSORS = 1
"""For CPU tensors, in Triton's interpreter. It runs programs one after the other, so one
multiprocessor's worth is enough. It also makes tests run programs with several pieces of work."""


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor)."""
    if device.type == "cpu":
        return INTERPRETED_CAPABILITY
    return torch.cuda.get_device_capability(device)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
