"""Watchers of the engine: each gets a picture of it at its own interval."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fastserve_client.engine_state import EngineState

from fastserve_backend.errors import DrainingError, OverloadedError

MAX_WATCHES = 8
"""Every picture costs server and client work. All viewers of a gateway share one watch."""

StateSink = Callable[[EngineState | None], None]
"""Called with each picture, and with None when there will be no more. Must return at once and not
raise."""


@dataclass(slots=True)
class _Watch:
    interval_s: float
    sink: StateSink
    due_s: float = -math.inf


class Watches:
    """All watchers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next two
        self._watches: dict[int, _Watch] = {}
        self._closed = False
        self._numbers = itertools.count()
        self._next_due_s = math.inf

    def add(self, interval_s: float, sink: StateSink) -> int:
        """A new watcher, whose first picture is due at once. Returns a number for ``remove``.

        Raises:
            OverloadedError: there are ``MAX_WATCHES`` already.
            DrainingError: ``close`` was called.
        """
        with self._lock:
            if self._closed:
                raise DrainingError("the server is shutting down and shows its state no more")
            if len(self._watches) >= MAX_WATCHES:
                raise OverloadedError(f"{MAX_WATCHES} others watch already; try again later")
            number = next(self._numbers)
            self._watches[number] = _Watch(interval_s, sink)
            self._update_next_due()
            return number

    def remove(self, number: int) -> None:
        """The watcher is gone; unknown numbers are ignored."""
        with self._lock:
            self._watches.pop(number, None)
            self._update_next_due()

    def due_in_s(self, now: float) -> float:
        """Seconds until the next picture is due; infinity if nobody watches."""
        return max(0.0, self._next_due_s - now)

    def show(self, now: float, state: EngineState) -> None:
        """Give the picture to every watcher that is due."""
        with self._lock:
            for watch in self._watches.values():
                if watch.due_s <= now:
                    watch.sink(state)
                    watch.due_s = now + watch.interval_s
            self._update_next_due()

    def close(self) -> None:
        """End all watches and refuse new ones; idempotent."""
        with self._lock:
            self._closed = True
            for watch in self._watches.values():
                watch.sink(None)
            self._watches.clear()
            self._update_next_due()

    def _update_next_due(self) -> None:
        self._next_due_s = min((watch.due_s for watch in self._watches.values()), default=math.inf)
