"""A clock that stands still while there are no ranks.

Policy and KV manager go by it. Nobody can run without ranks, so nobody starves.
"""

from __future__ import annotations

from fastserve_backend.system.clock import Clock


class ServingClock:
    """Seconds of ``clock``, without those between ``stop`` and ``restart``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stopped_s: float | None = None
        self._left_out_s = 0.0  # in all earlier stops

    def now(self) -> float:
        return self.at(self._clock.now())

    def at(self, time_s: float) -> float:
        """``time_s`` of the other clock, on this one. Exact for times since the last restart."""
        if self._stopped_s is not None:
            time_s = min(time_s, self._stopped_s)
        return time_s - self._left_out_s

    def stop(self) -> None:
        """The ranks are lost. The clock must be running."""
        assert self._stopped_s is None
        self._stopped_s = self._clock.now()

    def restart(self) -> None:
        """There are ranks again. The clock must stand still."""
        assert self._stopped_s is not None
        self._left_out_s += self._clock.now() - self._stopped_s
        self._stopped_s = None
