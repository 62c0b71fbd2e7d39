"""The jobs of a policy, in its order, for one selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from fastserve_backend.job import PLACES, Job, Place

OrderKey = tuple[float, float]


class Walk(Protocol):
    """Yields jobs, the most urgent first."""

    def __iter__(self) -> Iterator[Job]: ...

    def __next__(self) -> Job: ...

    def skip(self, place: Place) -> None:
        """From now on, yield no job whose KV is at ``place``."""
        ...


class MergedWalk:
    """Lazily merges sorted sequences of jobs, one for each ``Place``.

    Args:
        part: gives (key, job) of all jobs at a place, sorted by key.
    """

    def __init__(self, part: Callable[[Place], Iterator[tuple[OrderKey, Job]]]) -> None:
        self._parts = [part(place) for place in PLACES]
        self._next = [next(items, None) for items in self._parts]

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        nowhere, device, host = self._next
        first, place = nowhere, Place.NOWHERE
        if device is not None and (first is None or device[0] < first[0]):
            first, place = device, Place.DEVICE
        if host is not None and (first is None or host[0] < first[0]):
            first, place = host, Place.HOST
        if first is None:
            raise StopIteration
        self._next[place] = next(self._parts[place], None)
        return first[1]

    def skip(self, place: Place) -> None:
        """From now on, yield no job whose KV is at ``place``."""
        self._next[place] = None
