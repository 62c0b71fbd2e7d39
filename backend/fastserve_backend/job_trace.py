"""When a traced job was set aside, and when its KV was copied."""

from __future__ import annotations

from typing import NamedTuple

MAX_PERIODS = 100
"""Most periods that a job keeps; later ones are only counted. A job may be set aside at each of its
tokens, and each period becomes a span."""


class Period(NamedTuple):
    """Something that happened to a job, in seconds of the engine's clock."""

    name: str
    """``preemption``, or the value of a ``TransferKind``."""
    start_s: float
    end_s: float
    num_blocks: int
    """KV blocks that were copied; 0 for a preemption."""


class JobTrace:
    """Periods of one job. The step loop's thread writes it, until the job has ended."""

    def __init__(self) -> None:
        self.periods: list[Period] = []
        self.num_left_out = 0
        self._set_aside_s: float | None = None

    def on_preempted(self, now: float) -> None:
        """The job was set aside for others."""
        self._set_aside_s = now

    def on_running(self, now: float) -> None:
        """The job is in the next step, or has ended."""
        if self._set_aside_s is not None:
            self.add("preemption", self._set_aside_s, now)
            self._set_aside_s = None

    def add(self, name: str, start_s: float, end_s: float, num_blocks: int = 0) -> None:
        if len(self.periods) < MAX_PERIODS:
            self.periods.append(Period(name, start_s, end_s, num_blocks))
        else:
            self.num_left_out += 1
