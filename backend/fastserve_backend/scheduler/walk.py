"""Jobs in a policy's order, for one selection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from fastserve_backend.job import Job

OrderKey = tuple[float, float]


class Walk(Protocol):
    """Yields jobs, the most urgent first."""

    def __iter__(self) -> Iterator[Job]: ...

    def __next__(self) -> Job: ...

    def skip_new(self) -> None:
        """Yield only jobs that have begun from now on."""
        ...


class MergedWalk:
    """Of two ordered sequences, merged as they are asked for.

    Args:
        new, begun: (key, job) in order of the keys, of jobs that are new and that have begun.
    """

    def __init__(
        self, new: Iterator[tuple[OrderKey, Job]], begun: Iterator[tuple[OrderKey, Job]]
    ) -> None:
        self._new, self._begun = new, begun
        self._next_new = next(new, None)
        self._next_begun = next(begun, None)

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        new, begun = self._next_new, self._next_begun
        if new is not None and (begun is None or new[0] < begun[0]):
            self._next_new = next(self._new, None)
            return new[1]
        if begun is None:
            raise StopIteration
        self._next_begun = next(self._begun, None)
        return begun[1]

    def skip_new(self) -> None:
        """Yield only jobs that have begun from now on."""
        self._next_new = None


def by_key(items: Iterable[tuple[float, Job]]) -> Iterator[tuple[OrderKey, Job]]:
    """Of equal keys the first to arrive comes first."""
    return (((key, job.number), job) for key, job in items)
