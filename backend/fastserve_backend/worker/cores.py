"""How many processor cores a container leaves to the ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path

# Of version 2, as a container sees its own; at a host's root there is none.
_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def num_cores(quota_file: Path = _QUOTA_FILE) -> int:
    """Those that this process may run on, or fewer where its container may use less time: threads
    beyond that would take it from each other while they wait."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota_us, period_us = quota_file.read_text(encoding="ascii").split()
    except OSError:
        return allowed
    if quota_us == "max":
        return allowed
    return min(allowed, math.ceil(int(quota_us) / int(period_us)))
