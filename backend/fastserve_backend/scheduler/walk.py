"""Jobs in a policy's order, for one selection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fastserve_backend.job import Job, Place

OrderKey = tuple[float, float]


class Walk(Protocol):
    """Yields jobs, the most urgent first."""

    def __iter__(self) -> Iterator[Job]: ...

    def __next__(self) -> Job: ...

    def skip(self, place: Place) -> None:
        """Yield no job whose KV is there from now on."""
        ...


class MergedWalk:
    """Of ordered sequences, one for each ``Place``, merged as they are asked for.

    Args:
        part: (key, job) of the jobs of a place, in order of the keys.
    """

    def __init__(self, part: Callable[[Place], Iterator[tuple[OrderKey, Job]]]) -> None:
        self._parts = [part(place) for place in Place]
        self._next = [next(items, None) for items in self._parts]

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        first: tuple[OrderKey, Job] | None = None
        place = 0
        for index, item in enumerate(self._next):
            if item is not None and (first is None or item[0] < first[0]):
                first, place = item, index
        if first is None:
            raise StopIteration
        self._next[place] = next(self._parts[place], None)
        return first[1]

    def skip(self, place: Place) -> None:
        """Yield no job whose KV is there from now on."""
        self._next[place] = None


def by_key(items: Iterable[tuple[float, Job]]) -> Iterator[tuple[OrderKey, Job]]:
    """Of equal keys the first to arrive comes first."""
    return (((key, job.number), job) for key, job in items)
