"""Waiting for what another thread or process decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

DEADLINE_S = 30.0


def wait_for(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> float:
    """Seconds until ``condition`` held. Fails after ``timeout_s``."""
    started_s = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"not within {timeout_s} s"
        pause.wait(0.002)
    return time.monotonic() - started_s
