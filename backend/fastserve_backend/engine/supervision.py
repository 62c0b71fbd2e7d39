"""Fresh ranks for those that died, without making the engine deaf meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from fastserve_backend.executor.base import OwnedExecutor

# How often a start that is given up is told so: it may have been between two processes before.
_ABANDON_POLL_S = 0.05

T = TypeVar("T")


class RankStart(Generic[T]):
    """Replaces broken ranks by fresh ones, on a thread of its own, because loading a model takes up
    to minutes.

    Args:
        broken: ended first, so that the fresh ranks find its memory free.
        make_executor: makes the fresh one.
        start: starts it; what it returns or raises, ``result`` does.
        on_end: called by the thread when ``result`` would not wait any more.
    """

    def __init__(
        self,
        broken: OwnedExecutor,
        make_executor: Callable[[], OwnedExecutor],
        start: Callable[[OwnedExecutor], T],
        on_end: Callable[[], None],
    ) -> None:
        self._broken = broken
        self._make_executor = make_executor
        self._start = start
        self._on_end = on_end
        self._executor: OwnedExecutor | None = None
        self._started: T | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-start", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    def result(self) -> tuple[OwnedExecutor, T]:
        """The fresh ranks, which are the caller's from now on.

        Raises:
            FastServeError: they did not start; nothing is left of them.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._executor is not None
        assert self._started is not None
        return self._executor, self._started

    def abandon(self) -> None:
        """End the start, and whatever of the ranks there is, at once."""
        self._abandoned = True
        while self._thread.is_alive():
            for executor in (self._broken, self._executor):
                if executor is not None:
                    executor.kill()
            self._thread.join(_ABANDON_POLL_S)
        if self._error is None and self._executor is not None:
            self._executor.close()

    def _run(self) -> None:
        try:
            self._broken.kill()  # a stopped rank would not listen, others wait for it
            self._broken.close()
            if not self._abandoned:
                self._executor = self._make_executor()
                self._started = self._start(self._executor)
        except BaseException as error:
            self._error = error
            if self._executor is not None:
                self._executor.close()
        finally:
            self._ended.set()
            self._on_end()
