"""How long a rank's device works on a step."""

from __future__ import annotations

import time

import torch

_Instant = float | torch.cuda.Event


class Stopwatch:
    """Runs from when it is made until it is stopped.

    With a GPU both are commands to it, for which the host does not wait: the watch starts when the
    GPU has done what it was given before, such as an earlier step or the receiving of activations,
    and stops when it has done what it was given until then. So the watches of steps that were
    launched one after another never run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._started = self._now()
        self._stopped = self._started

    def stop(self) -> None:
        """By the thread that made it, on the same stream."""
        self._stopped = self._now()

    def seconds(self) -> float:
        """Between the two, for any thread. With a GPU it waits until that has stopped the watch, so
        that what it was given before is done."""
        started, stopped = self._started, self._stopped
        if isinstance(started, float):
            assert isinstance(stopped, float)
            return stopped - started
        assert isinstance(stopped, torch.cuda.Event)
        stopped.synchronize()
        return float(started.elapsed_time(stopped)) / 1e3

    def _now(self) -> _Instant:
        if not self._is_gpu:
            return time.perf_counter()
        # A wait for it sleeps: spinning would take a core from those who launch and copy.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event
