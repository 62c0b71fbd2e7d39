"""Waits for other threads and processes."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 30.0


def wait_for(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> float:
    """Waits until ``condition`` holds; returns the seconds that took. Fails after ``timeout_s``."""
    started_s = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"not within {timeout_s} s"
        pause.wait(0.002)
    return time.monotonic() - started_s


def wait_for_log(
    process: subprocess.Popen[bytes], log: Path, pattern: str, timeout_s: float
) -> str:
    """Waits until ``log`` matches ``pattern``; returns the first group. Fails if the process ends
    before."""
    found: list[str] = []

    def is_there() -> bool:
        text = log.read_text(encoding="utf-8")
        assert process.poll() is None, text
        found.extend(re.findall(pattern, text))
        return bool(found)

    wait_for(is_there, timeout_s)
    return found[0]
