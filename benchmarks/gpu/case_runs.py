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
"""In a worker: which cases were begun by any."""


class CaseRuns(Generic[Result]):
    """Workers that take one case after the other. They are ended at the end of the context,
    whatever they do: a case may hang, and one that ends its worker never has a result.

    Args:
        run: of a module, which each worker imports: it is a process of its own.
        cases: the numbers from 0 that it is called with, each once.
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
        """As they come, until ``ends_s`` of ``time.monotonic``; no more when it is past."""
        while self._unfinished:
            try:
                case, result = self._ended.next(ends_s - time.monotonic())
            except NoneEnded:
                return
            self._unfinished.remove(case)
            yield result

    @property
    def num_unfinished(self) -> int:
        """Cases that have given no result yet."""
        return len(self._unfinished)

    @property
    def under_way(self) -> list[int]:
        """Those of them that were begun."""
        return [case for case in sorted(self._unfinished) if self._begun[case]]


def _share(begun: Array[c_bool]) -> None:
    global _begun
    _begun = begun


def _run_one(run: Callable[[int], Result], case: int) -> tuple[int, Result]:
    _begun[case] = True
    return case, run(case)
