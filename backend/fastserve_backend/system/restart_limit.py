"""Whether something that died is started once more."""

from __future__ import annotations

from collections import deque

# What keeps dying has a cause that another restart will not remove.
_MAX_RESTARTS = 3
_WINDOW_S = 600.0


class RestartLimiter:
    """Allows three restarts in any ten minutes. A pure decision: the time is passed in."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def restart(self, now: float) -> int | None:
        """Take a restart if one is left: its number among those of the window that ends ``now``,
        1 for the first. None: there were too many."""
        while self._times and now - self._times[0] >= _WINDOW_S:
            self._times.popleft()
        if len(self._times) == _MAX_RESTARTS:
            return None
        self._times.append(now)
        return len(self._times)

    def leave_out(self, seconds: float) -> None:
        """Time that has passed but does not count, as that of a start: what dies after each start
        would else be started for ever, if a start takes long enough."""
        self._times = deque(time_s + seconds for time_s in self._times)

    def describe(self) -> str:
        """The limit, as a log line says it."""
        return f"{_MAX_RESTARTS} restarts in {_WINDOW_S / 60:.0f} minutes"
