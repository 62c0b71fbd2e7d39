"""How many jobs refer to each block of a pool, and how many blocks only certain jobs have.

A block is free when the last job that refers to it gives it up. So what several jobs leave behind
is not the sum of their tables. Each decision asks for such numbers, so they are updated with each
change. What jobs leave that are chosen only then is counted by ``FreedBlocks``.

While no block is shared, these numbers are sums. So block by block is counted only from the first
shared block on, until there is none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]
"""int32 [n]: different block numbers."""


class Tables(Protocol):
    """The blocks that jobs have."""

    def num_held(self, job_number: int) -> int: ...

    def all_blocks(self, job_number: int) -> Blocks: ...


class References:
    """The counts of a pool, and the sets of jobs that it keeps.

    Args:
        tables: of the pool, which tells each change of them before it makes it.
    """

    def __init__(self, num_blocks: int, tables: Tables) -> None:
        # The same memory twice: a few blocks are faster in an array, many are in numpy.
        self.counts = array("i", bytes(4 * num_blocks))
        self.view = np.frombuffer(self.counts, np.int32)
        self.num_shared = 0
        """Blocks to which several jobs refer."""
        self._tables = tables
        self._sets: list[JobSet] = []

    def job_set(self) -> JobSet:
        """A new set, which is empty."""
        self._sets.append(JobSet(self, self._tables))
        return self._sets[-1]

    def add_new(self, job_number: int, blocks: list[int]) -> None:
        """The job refers to these blocks from now on, to which no job does."""
        for block in blocks:
            self.counts[block] = 1
        for jobs in self._sets:
            if job_number in jobs:
                jobs.on_new(blocks)

    def add(self, job_number: int, blocks: Blocks) -> None:
        """The job refers to these blocks from now on."""
        before = self.view[blocks]
        num_more_shared = int(np.count_nonzero(before == 1))
        if num_more_shared and not self.num_shared:
            for jobs in self._sets:
                jobs.count_own()
        self.num_shared += num_more_shared
        for jobs in self._sets:
            jobs.before_added(job_number, blocks)
        self.view[blocks] = before + 1

    def drop(self, job_number: int, blocks: array[int]) -> array[int]:
        """The job gives up these blocks. Returns those to which no job refers now, in order."""
        if not self.num_shared:
            for jobs in self._sets:
                if job_number in jobs:
                    jobs.num_alone -= len(blocks)
            for block in blocks:
                self.counts[block] = 0
            return blocks
        indices = np.frombuffer(blocks, np.int32)
        for jobs in self._sets:
            jobs.before_dropped(job_number, indices)
        before = self.view[indices]
        self.num_shared -= int(np.count_nonzero(before == 2))
        self.view[indices] = before - 1
        return array("i", indices[before == 1].tobytes())

    def num_alone(self, blocks: Blocks) -> int:
        """How many of these blocks, which one job has, no other job has."""
        return int(np.count_nonzero(self.view[blocks] == 1))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sets agree with the blocks of their jobs."""
        for jobs in self._sets:
            jobs.check_integrity()


class JobSet:
    """Jobs with blocks, and how many blocks only they have."""

    def __init__(self, references: References, tables: Tables) -> None:
        self.num_alone = 0
        """Blocks that are free if all these jobs leave."""
        self.own = np.zeros_like(references.view)
        """References of these jobs to each block, while any block is shared."""
        self._references = references
        self._tables = tables
        self._jobs: set[int] = set()

    def __contains__(self, job_number: int) -> bool:
        return job_number in self._jobs

    def __iter__(self) -> Iterator[int]:
        return iter(self._jobs)

    def add(self, job_number: int) -> None:
        """Add a job."""
        self._jobs.add(job_number)
        if not self._references.num_shared:
            self.num_alone += self._tables.num_held(job_number)
            return
        blocks = self._tables.all_blocks(job_number)
        self.own[blocks] += 1
        self.num_alone += self._count_all_own(blocks)

    def remove(self, job_number: int) -> None:
        """Remove a job."""
        self._jobs.discard(job_number)
        if not self._references.num_shared:
            self.num_alone -= self._tables.num_held(job_number)
            return
        blocks = self._tables.all_blocks(job_number)
        self.num_alone -= self._count_all_own(blocks)
        self.own[blocks] -= 1

    def count_own(self) -> None:
        """A block is about to be shared, the first one."""
        self.own[:] = 0
        for job_number in self._jobs:
            self.own[self._tables.all_blocks(job_number)] = 1

    def on_new(self, blocks: list[int]) -> None:
        """One of the jobs has these blocks, which no job had."""
        self.num_alone += len(blocks)
        if self._references.num_shared:
            self.own[blocks] = 1

    def before_added(self, job_number: int, blocks: Blocks) -> None:
        """A job is about to refer to these blocks."""
        if job_number in self._jobs:
            self.num_alone += int(np.count_nonzero(self._references.view[blocks] == 0))
            self.own[blocks] += 1
        elif self._jobs and self._references.num_shared:
            self.num_alone -= self._count_all_own(blocks)

    def before_dropped(self, job_number: int, blocks: Blocks) -> None:
        """A job is about to give up these blocks, while any block is shared."""
        if job_number in self._jobs:
            self.num_alone -= self._references.num_alone(blocks)
            self.own[blocks] -= 1
        elif self._jobs:
            others = self._references.view[blocks] - 1
            self.num_alone += int(np.count_nonzero((others > 0) & (self.own[blocks] == others)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the numbers agree with the blocks of the jobs."""
        own = np.zeros_like(self.own)
        for job_number in self._jobs:
            own[self._tables.all_blocks(job_number)] += 1
        if self._references.num_shared:
            assert np.array_equal(own, self.own), "references of a set of jobs"
        counts = self._references.view
        assert self.num_alone == np.count_nonzero((own > 0) & (own == counts))

    def _count_all_own(self, blocks: Blocks) -> int:
        """How many of these blocks only jobs of the set have."""
        own = self.own[blocks]
        return int(np.count_nonzero((own > 0) & (own == self._references.view[blocks])))
