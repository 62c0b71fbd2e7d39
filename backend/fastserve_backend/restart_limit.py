"""Whether something that died is started once more."""

from __future__ import annotations

from collections import deque

# What keeps dying has a cause that another restart will not remove.
MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0


class RestartLimiter:
    """Allows ``max_restarts`` in any ``window_s``. A pure decision: the time is passed in."""

    def __init__(
        self, max_restarts: int = MAX_RESTARTS, window_s: float = RESTART_WINDOW_S
    ) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times: deque[float] = deque()

    def restart(self, now: float) -> int | None:
        """Take a restart if one is left: its number among those of the window that ends ``now``,
        1 for the first. None: there were too many."""
        while self._times and now - self._times[0] >= self._window_s:
            self._times.popleft()
        if len(self._times) == self._max_restarts:
            return None
        self._times.append(now)
        return len(self._times)

    def leave_out(self, seconds: float) -> None:
        """Time that has passed but does not count, as that of a start: what dies after each start
        would else be started for ever, if a start takes long enough."""
        self._times = deque(time_s + seconds for time_s in self._times)

    def describe(self) -> str:
        """The limit, as a log line says it."""
        return f"{self._max_restarts} restarts in {self._window_s / 60:.0f} minutes"
