"""Jobs kept in order of a key that may change, apart by where their KV is."""

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
    """Jobs by ascending key; equal keys in order of arrival.

    A sorted array: an insertion costs O(log n) comparisons and moves 8 bytes for each job behind it
    (80 kB with 10,000 jobs, microseconds), and a walk is a plain iteration.
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
        """How many jobs come before one of this key and number, which may be here or not."""
        return bisect_left(self._order, (key, number))

    def items(self) -> Iterator[tuple[tuple[float, float], Job]]:
        """((key, job's number), job), in order."""
        jobs = self._jobs
        return ((place, jobs[place[1]][1]) for place in self._order)

    def jobs(self, *, last_first: bool) -> Iterator[Job]:
        """In order, or the other way round."""
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
        """Give every job its key anew; much cheaper than moving them one by one."""
        self._jobs = {number: (key(job), job) for number, (_, job) in self._jobs.items()}
        self._order = sorted((new, number) for number, (new, _) in self._jobs.items())


class WeighedJobs(OrderedJobs):
    """The same, with the sums of their weights.

    Args:
        weight: of a job, asked for when it is added, moved or reordered.
    """

    def __init__(self, weight: Callable[[Job], float]) -> None:
        super().__init__()
        self._weight = weight
        self._weights = array("d")  # as the jobs are ordered

    def sums(self) -> NDArray[np.float64]:
        """Shape [jobs + 1]: of the weights of the first 0, 1, … jobs."""
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
        """Give the job another key, or only its weight of now."""
        self.remove(job)
        self.add(job, key)

    def reorder(self, key: Callable[[Job], float]) -> None:
        super().reorder(key)
        self._weights = array("d", map(self._weight, self))


Part = TypeVar("Part", bound=OrderedJobs)


class SplitOrder(Generic[Part]):
    """The same, in a part for each ``Place``.

    Thousands of jobs may wait that cannot run now, because they are new or their KV is on the host.
    A selection passes over them at once, see ``Walk.skip``. The KV manager finds the jobs of one
    place in their order.

    Args:
        make_part: ``OrderedJobs``, or another kind of it.
    """

    def __init__(self, make_part: Callable[[], Part]) -> None:
        self._parts = tuple(make_part() for _ in Place)
        self._part_of: dict[int, Part] = {}  # by job number

    def __len__(self) -> int:
        return len(self._part_of)

    def __iter__(self) -> Iterator[Job]:
        """In order."""
        items = merge(*(part.items() for part in self._parts), key=itemgetter(0))
        return (job for _, job in items)

    def __contains__(self, job: Job) -> bool:
        return job.number in self._part_of

    def key(self, job: Job) -> float:
        """The key that the job was last given."""
        return self._part_of[job.number].key(job)

    def part(self, place: Place) -> Part:
        """Those whose KV is there."""
        return self._parts[place]

    def add(self, job: Job, key: float) -> None:
        part = self._parts[job.place]
        part.add(job, key)
        self._part_of[job.number] = part

    def remove(self, job: Job) -> None:
        self._part_of.pop(job.number).remove(job)

    def move(self, job: Job, key: float) -> None:
        """Give the job another key, and the part of its place."""
        part = self._part_of[job.number]
        if part is self._parts[job.place]:
            part.move(job, key)
        else:
            part.remove(job)
            self.add(job, key)

    def placed(self, job: Job) -> None:
        """The job's ``place`` has changed."""
        self.move(job, self.key(job))

    def reorder(self, key: Callable[[Job], float]) -> None:
        """Give every job its key anew."""
        for part in self._parts:
            part.reorder(key)
