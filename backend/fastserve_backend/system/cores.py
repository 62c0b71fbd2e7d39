"""The cores that a host, or its container, leaves to this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

# Read before torch is imported: its OpenMP may then bind this thread to one core (OMP_PROC_BIND).
ALLOWED_CORES = tuple(sorted(os.sched_getaffinity(0)))
_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")  # of control groups of version 2


def num_cores(quota_file: Path = _QUOTA_FILE) -> int:
    """The cores that this process may use, or fewer if its container may use less CPU time. More
    threads than that would take time from each other while they wait."""
    try:
        quota_us, period_us = quota_file.read_text(encoding="ascii").split()
    except OSError:
        return len(ALLOWED_CORES)
    if quota_us == "max":
        return len(ALLOWED_CORES)
    return min(len(ALLOWED_CORES), math.ceil(int(quota_us) / int(period_us)))
