"""What becomes free if jobs leave that are chosen one after the other."""

from __future__ import annotations

import numpy as np

from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.references import Blocks, JobSet


class FreedBlocks:
    """Counts blocks of a pool that only the jobs have which have been added.

    Args:
        leaving: jobs that leave first. What becomes free with that does not count.
    """

    def __init__(self, pool: BlockPool, *leaving: JobSet) -> None:
        self._pool = pool
        self._references = pool.references
        self._leaving = leaving
        self._given_up: Blocks | None = None  # references, by block

    def add(self, job_number: int) -> int:
        """Another job leaves. Returns how many blocks become free with that."""
        if not self._references.num_shared:
            return self._pool.num_held(job_number)
        return self.add_blocks(self._pool.all_blocks(job_number))

    def add_blocks(self, blocks: Blocks) -> int:
        """Another job gives up these blocks. Returns how many become free with that."""
        if not self._references.num_shared:
            return len(blocks)
        given_up = self._count()
        given_up[blocks] += 1
        return int(np.count_nonzero(given_up[blocks] == self._references.view[blocks]))

    def keep(self, job_number: int) -> None:
        """A job of ``leaving``, or one that has been added, stays after all."""
        if self._references.num_shared:
            self._count()[self._pool.all_blocks(job_number)] -= 1

    def _count(self) -> Blocks:
        if self._given_up is None:
            self._given_up = np.zeros_like(self._references.view)
            for jobs in self._leaving:
                self._given_up += jobs.own
        return self._given_up
