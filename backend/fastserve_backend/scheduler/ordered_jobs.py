"""Jobs sorted by a key that may change, in a part for each place of their KV."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import merge
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastserve_backend.job import Job, Place


class OrderedJobs:
    """Jobs by ascending key, and by arrival where keys are equal.

    A sorted list. An insertion costs O(log n) comparisons and moves 8 bytes for each job behind the
    new one: at most 80 kB with 10,000 jobs, which takes microseconds. A walk is a plain iteration.
    """

    def __init__(self) -> None:
        self._order: list[tuple[float, int]] = []  # (key, job number)
        self._jobs: dict[int, tuple[float, Job]] = {}  # job number → (key, job)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return (self._jobs[number][1] for _, number in self._order)

    def __contains__(self, job: Job) -> bool:
        return job.number in self._jobs

    def key(self, job: Job) -> float:
        """The key that the job was last given."""
        return self._jobs[job.number][0]

    def num_before(self, key: float, number: int) -> int:
        """How many jobs come before a job with this key and number, which need not be here."""
        return bisect_left(self._order, (key, number))

    def items(self) -> Iterator[tuple[tuple[float, float], Job]]:
        """((key, job's number), job) of all jobs, in order."""
        jobs = self._jobs
        return ((entry, jobs[entry[1]][1]) for entry in self._order)

    def jobs(self, *, last_first: bool) -> Iterator[Job]:
        """All jobs, in order or in reverse order."""
        order = reversed(self._order) if last_first else self._order
        return (self._jobs[number][1] for _, number in order)

    def add(self, job: Job, key: float) -> None:
        assert job.number not in self._jobs
        self._jobs[job.number] = (key, job)
        insort(self._order, (key, job.number))

    def remove(self, job: Job) -> None:
        key, _ = self._jobs.pop(job.number)
        del self._order[bisect_left(self._order, (key, job.number))]

    def move(self, job: Job, key: float) -> None:
        """Give the job another key."""
        if self._jobs[job.number][0] != key:
            self.remove(job)
            self.add(job, key)

    def reorder(self, key: Callable[[Job], float]) -> None:
        """Give every job a new key. This is much cheaper than moving each job."""
        self._jobs = {number: (key(job), job) for number, (_, job) in self._jobs.items()}
        self._order = sorted((new, number) for number, (new, _) in self._jobs.items())


class WeighedJobs(OrderedJobs):
    """``OrderedJobs`` with a weight for each job, and sums of weights.

    Args:
        weight: gives a job's weight. Called when the job is added, moved or reordered.
    """

    def __init__(self, weight: Callable[[Job], float]) -> None:
        super().__init__()
        self._weight = weight
        self._weights = array("d")  # in the order of the jobs

    def sums(self) -> NDArray[np.float64]:
        """The sums of the weights of the first 0, 1, … jobs; shape [jobs + 1]."""
        sums = np.zeros(len(self._weights) + 1)
        np.cumsum(self._weights, out=sums[1:])
        return sums

    def add(self, job: Job, key: float) -> None:
        self._weights.insert(self.num_before(key, job.number), self._weight(job))
        super().add(job, key)

    def remove(self, job: Job) -> None:
        del self._weights[self.num_before(self.key(job), job.number)]
        super().remove(job)

    def move(self, job: Job, key: float) -> None:
        """Give the job another key, which may be the same, and its current weight."""
        self.remove(job)
        self.add(job, key)

    def reorder(self, key: Callable[[Job], float]) -> None:
        super().reorder(key)
        self._weights = array("d", map(self._weight, self))


Part = TypeVar("Part", bound=OrderedJobs)


class SplitOrder(Generic[Part]):
    """Sorted jobs, in one part for each ``Place``.

    Thousands of waiting jobs may be unable to run now, because they are new or their KV is on the
    host. With parts, a selection skips them all at once, see ``Walk.skip``. And the KV manager
    finds the jobs of one place in order.

    Args:
        make_part: ``OrderedJobs`` or a subclass.
    """

    def __init__(self, make_part: Callable[[], Part]) -> None:
        self._parts = tuple(make_part() for _ in Place)
        self._part_of: dict[int, Part] = {}  # by job number

    def __len__(self) -> int:
        return len(self._part_of)

    def __iter__(self) -> Iterator[Job]:
        """All jobs, in order."""
        items = merge(*(part.items() for part in self._parts), key=itemgetter(0))
        return (job for _, job in items)

    def __contains__(self, job: Job) -> bool:
        return job.number in self._part_of

    def key(self, job: Job) -> float:
        """The key that the job was last given."""
        return self._part_of[job.number].key(job)

    def part(self, place: Place) -> Part:
        """The jobs whose KV is at ``place``."""
        return self._parts[place]

    def add(self, job: Job, key: float) -> None:
        part = self._parts[job.place]
        part.add(job, key)
        self._part_of[job.number] = part

    def remove(self, job: Job) -> None:
        self._part_of.pop(job.number).remove(job)

    def move(self, job: Job, key: float) -> None:
        """Give the job another key, and put it in the part of its place."""
        part = self._part_of[job.number]
        if part is self._parts[job.place]:
            part.move(job, key)
        else:
            part.remove(job)
            self.add(job, key)

    def on_place_changed(self, job: Job) -> None:
        """The job's ``place`` has changed."""
        self.move(job, self.key(job))

    def reorder(self, key: Callable[[Job], float]) -> None:
        """Give every job a new key."""
        for part in self._parts:
            part.reorder(key)
