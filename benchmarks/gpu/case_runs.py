"""Cases run by several processes at once, until all have ended or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import Array, c_bool
from functools import partial
from multiprocessing import TimeoutError as NoneEnded
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray
from types import TracebackType
from typing import Generic, TypeVar

Result = TypeVar("Result")

_begun: Array[c_bool]
"""In a worker: the cases that any worker has begun."""


class CaseRuns(Generic[Result]):
    """Workers that take one case after the other.

    The end of the context kills them, because a case may hang. A case that ends its worker has no
    result.

    Args:
        run: a module's function. Each worker is a process of its own, and imports the module.
        cases: numbers from 0; ``run`` is called once with each.
    """

    def __init__(
        self, run: Callable[[int], Result], cases: Sequence[int], num_workers: int
    ) -> None:
        self._begun = RawArray(c_bool, max(cases) + 1)
        self._unfinished = set(cases)
        self._pool = get_context("spawn").Pool(num_workers, _share, (self._begun,))
        self._ended = self._pool.imap_unordered(partial(_run_one, run), cases)

    def __enter__(self) -> CaseRuns[Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.terminate()
        self._pool.join()

    def results(self, ends_s: float) -> Iterator[Result]:
        """Yields results as they come, until ``time.monotonic`` is past ``ends_s``."""
        while self._unfinished:
            try:
                case, result = self._ended.next(ends_s - time.monotonic())
            except NoneEnded:
                return
            self._unfinished.remove(case)
            yield result

    @property
    def num_unfinished(self) -> int:
        """Number of cases without a result."""
        return len(self._unfinished)

    @property
    def under_way(self) -> list[int]:
        """Cases that have begun and have no result."""
        return [case for case in sorted(self._unfinished) if self._begun[case]]


def _share(begun: Array[c_bool]) -> None:
    global _begun
    _begun = begun


def _run_one(run: Callable[[int], Result], case: int) -> tuple[int, Result]:
    _begun[case] = True
    return case, run(case)
