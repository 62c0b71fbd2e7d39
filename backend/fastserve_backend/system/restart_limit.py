"""How often something that died is started again."""

from __future__ import annotations

from collections import deque

# After more restarts, the cause is one that another restart does not remove.
_MAX_RESTARTS = 3
_WINDOW_S = 600.0


class RestartLimiter:
    """Allows three restarts in any ten minutes. It decides only, and reads no clock."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def take_restart(self, now: float) -> int | None:
        """Take a restart if one is left.

        Returns:
            Its number among those of the ten minutes that end ``now``, 1 for the first; None: no
            restart is left.
        """
        while self._times and now - self._times[0] >= _WINDOW_S:
            self._times.popleft()
        if len(self._times) == _MAX_RESTARTS:
            return None
        self._times.append(now)
        return len(self._times)

    def leave_out(self, seconds: float) -> None:
        """Do not count these past seconds, such as those of a start. Otherwise something that dies
        after each start would be restarted for ever, if a start takes long enough."""
        self._times = deque(time_s + seconds for time_s in self._times)

    def describe(self) -> str:
        """The limit, as a log line says it."""
        return f"{_MAX_RESTARTS} restarts in {_WINDOW_S / 60:.0f} minutes"
