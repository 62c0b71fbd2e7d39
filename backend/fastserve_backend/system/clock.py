"""Time as a dependency: the scheduler and the engine never read the wall clock themselves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        if now_s < self._now_s:
            raise ValueError(f"a clock cannot go back from {self._now_s} s to {now_s} s")
        self._now_s = now_s
