"""Fresh ranks for those that died, without making the engine deaf meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from fastserve_backend.errors import EngineError
from fastserve_backend.executor.base import OwnedExecutor
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.rank_protocol.messages import Ready

# How often a start that is given up is told so: it may have been between two processes before.
_ABANDON_POLL_S = 0.05


class RankStart:
    """Replaces broken ranks by fresh ones, on a thread of its own, because loading a model takes up
    to minutes.

    Args:
        broken: ended first, so that the fresh ranks find its memory free.
        make_executor: makes the fresh one.
        start: starts it.
    """

    def __init__(
        self,
        broken: OwnedExecutor,
        make_executor: Callable[[], OwnedExecutor],
        start: Callable[[OwnedExecutor], tuple[Ready, LatencyProfile]],
    ) -> None:
        self._broken = broken
        self._make_executor = make_executor
        self._start = start
        self._executor: OwnedExecutor | None = None
        self._abandoned = False
        self.fresh: Future[tuple[OwnedExecutor, Ready, LatencyProfile]] = Future()
        """The fresh ranks, which are then the caller's; or why they did not start, a FastServeError
        if it is no bug: then nothing is left of them."""
        self._thread = threading.Thread(target=self._run, name="rank-start", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """End the start, and whatever of the ranks there is, at once."""
        self._abandoned = True
        while self._thread.is_alive():
            for executor in (self._broken, self._executor):
                if executor is not None:
                    executor.kill()
            self._thread.join(_ABANDON_POLL_S)
        if self.fresh.exception() is None:
            self.fresh.result()[0].close()

    def _run(self) -> None:
        try:
            fresh = self._replace()
        except BaseException as error:
            self.fresh.set_exception(error)
        else:
            self.fresh.set_result(fresh)

    def _replace(self) -> tuple[OwnedExecutor, Ready, LatencyProfile]:
        self._broken.kill()  # a stopped rank would not listen, others wait for it
        self._broken.close()
        if self._abandoned:
            raise EngineError("the start of the ranks was given up")
        self._executor = self._make_executor()
        try:
            return self._executor, *self._start(self._executor)
        except BaseException:
            self._executor.close()
            raise
