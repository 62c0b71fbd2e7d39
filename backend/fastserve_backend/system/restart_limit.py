"""How often, and how soon, something that died is started again."""

from __future__ import annotations

from collections import deque

# After more restarts, the cause is one that another restart does not remove.
_MAX_RESTARTS = 3
_WINDOW_S = 600.0
_LONGEST_PAUSE_S = 60.0


class _RecentRestarts:
    """The restarts of the last ten minutes. It reads no clock."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def leave_out(self, seconds: float) -> None:
        """Do not count these past seconds, such as those of a start. Otherwise something that dies
        after each start would be restarted for ever, if a start takes long enough."""
        self._times = deque(time_s + seconds for time_s in self._times)

    def _forget_before(self, now: float) -> None:
        while self._times and now - self._times[0] >= _WINDOW_S:
            self._times.popleft()


class RestartLimiter(_RecentRestarts):
    """Allows three restarts in any ten minutes. It decides only."""

    def take_restart(self, now: float) -> int | None:
        """Take a restart if one is left.

        Returns:
            Its number among those of the ten minutes that end ``now``, 1 for the first; None: no
            restart is left.
        """
        self._forget_before(now)
        if len(self._times) == _MAX_RESTARTS:
            return None
        self._times.append(now)
        return len(self._times)

    def describe(self) -> str:
        """The limit, as a log line says it."""
        return f"{_MAX_RESTARTS} restarts in {_WINDOW_S / 60:.0f} minutes"


class RestartPauses(_RecentRestarts):
    """Allows any number of restarts, but after pauses: the first three in any ten minutes come at
    once, the next after 2 s, each further one after twice as long, 60 s at most. It decides only.

    This is for what strangers can end, such as an old tritonserver: it must not stay down when they
    stop.
    """

    def take_pause(self, now: float) -> float:
        """Seconds to wait before a restart, which counts from ``now`` on."""
        self._forget_before(now)
        self._times.append(now)
        num_paused = len(self._times) - _MAX_RESTARTS
        return min(2.0**num_paused, _LONGEST_PAUSE_S) if num_paused > 0 else 0.0
