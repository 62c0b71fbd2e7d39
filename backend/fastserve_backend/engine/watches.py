"""Who watches the engine, and when each is due for the next picture."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fastserve_client.engine_state import EngineState

from fastserve_backend.errors import DrainingError, OverloadedError

MAX_WATCHES = 8
"""Each costs server and clients work with every picture, and one gateway's viewers share one."""

StateSink = Callable[[EngineState | None], None]
"""Gets the pictures, and None when there will be no more. Must return at once and not raise."""


@dataclass(slots=True)
class _Watch:
    interval_s: float
    sink: StateSink
    due_s: float = -math.inf


class Watches:
    """Thread-safe. ``due_in_s`` is one comparison for an engine that nobody watches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next two
        self._watches: dict[int, _Watch] = {}
        self._closed = False
        self._numbers = itertools.count()
        self._next_due_s = math.inf

    def add(self, interval_s: float, sink: StateSink) -> int:
        """A watcher, due at once. Returns a number for ``remove``.

        Raises:
            OverloadedError: there are ``MAX_WATCHES``.
            DrainingError: closed.
        """
        with self._lock:
            if self._closed:
                raise DrainingError("the server is shutting down and shows its state no more")
            if len(self._watches) >= MAX_WATCHES:
                raise OverloadedError(f"{MAX_WATCHES} others watch already; try again later")
            number = next(self._numbers)
            self._watches[number] = _Watch(interval_s, sink)
            self._plan()
            return number

    def remove(self, number: int) -> None:
        """The watcher went away, if it was there."""
        with self._lock:
            self._watches.pop(number, None)
            self._plan()

    def due_in_s(self, now: float) -> float:
        """Seconds until a picture is wanted: 0 for now, infinity for never."""
        return max(0.0, self._next_due_s - now)

    def show(self, now: float, state: EngineState) -> None:
        """Hands the picture to those who are due."""
        with self._lock:
            for watch in self._watches.values():
                if watch.due_s <= now:
                    watch.sink(state)
                    watch.due_s = now + watch.interval_s
            self._plan()

    def close(self) -> None:
        """Ends all watches and refuses new ones; idempotent."""
        with self._lock:
            self._closed = True
            for watch in self._watches.values():
                watch.sink(None)
            self._watches.clear()
            self._plan()

    def _plan(self) -> None:
        self._next_due_s = min((watch.due_s for watch in self._watches.values()), default=math.inf)
