"""Cores that other processes use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends with the process that started it, however that ends.
_PROGRAM = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""
SPIN = [sys.executable, "-S", "-c", _PROGRAM]


@contextmanager
def busy_cores() -> Iterator[None]:
    """More processes spin than there are cores, meanwhile."""
    num_cores = len(os.sched_getaffinity(0))
    spinners = [subprocess.Popen(SPIN) for _ in range(num_cores + 1)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()
