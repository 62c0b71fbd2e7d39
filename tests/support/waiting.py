"""Waits for other threads and processes."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 120.0
"""For what takes a second on an idle machine, and must happen on any."""
PREDICTOR_LOAD_S = 300.0
"""For the length predictor to load, which has low priority."""
# Conditions that ask a server take the cores from what they wait for.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.03
POLL_S = 0.01
"""How often a server of ``http.server`` looks whether it is to end; else it ends within 0.5 s."""


def wait_for(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> float:
    """Waits until ``condition`` holds; returns the seconds that took. Fails after ``timeout_s``."""
    started_s = time.monotonic()
    pause, pause_s = threading.Event(), FIRST_PAUSE_S
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"not within {timeout_s} s"
        pause.wait(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
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
