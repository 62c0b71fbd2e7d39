"""KV of running jobs for jobs beside them that begin with the same tokens.

These copy the blocks, on the device, when they begin to run. So a block is one job's as ever, and
that others begin alike makes no difference to swapping and freeing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile

from fastserve_backend.job import Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys
from fastserve_backend.kv_cache.swap_costs import SwapCosts


@dataclass(slots=True)
class PrefixCopies:
    """What ranks copy before they run a step: ``from_blocks[i]`` to ``to_blocks[i]``."""

    from_blocks: array[int] = field(default_factory=lambda: array("i"))
    to_blocks: array[int] = field(default_factory=lambda: array("i"))
    sources: set[int] = field(default_factory=set)
    """Numbers of the jobs whose blocks are copied."""


class SharedPrefixes:
    """Knows of each beginning the jobs that have it on the device, and of each round what will be
    computed and copied. Changes ``num_shared`` of jobs."""

    def __init__(self, device: BlockPool, keys: PrefixKeys, costs: SwapCosts) -> None:
        self._device = device
        self._keys = keys
        self._costs = costs
        self._known: dict[int, list[bytes]] = {}  # by job
        # Of each key, in order of coming; a dict as an ordered set.
        self._holders: dict[bytes, dict[int, None]] = {}

    def add(self, job: Job) -> None:
        """What the job has computed is there for all steps that are sent from now on."""
        known = self._known.setdefault(job.number, [])
        for key in islice(self._keys.held(job), len(known), None):
            self._holders.setdefault(key, {})[job.number] = None
            known.append(key)

    def knows(self, job: Job) -> bool:
        """Whether the job has computed something that is on the device."""
        return job.number in self._known

    def remove(self, job: Job) -> None:
        """The job's KV leaves the device. What it was to copy may have gone when it is back."""
        job.num_shared = 0
        for key in self._known.pop(job.number, ()):
            del self._holders[key][job.number]
            if not self._holders[key]:
                del self._holders[key]

    def share(self, job: Job) -> None:
        """The job is to copy what others have behind its own blocks."""
        job.num_shared = len(self._sources(job)) * self._device.block_size

    def _sources(self, job: Job) -> list[int]:
        """For each block behind those that the job has, up to the first that nobody has: who has
        it."""
        found = []
        for key in islice(self._keys.wanted(job), job.num_computed // self._keys.block_size, None):
            if key not in self._holders:
                break
            found.append(next(iter(self._holders[key])))
        return found

    def begin(self, in_flight: Iterable[Job]) -> None:
        """A round.

        Args:
            in_flight: jobs that are not offered in it.
        """
        self.copies = PrefixCopies()
        self._beginning: list[Job] = []  # may have a prefix of which others know nothing yet
        # Keys of what these have when the step has run, and of prefills that are in flight.
        self._coming: set[bytes] = set()
        for job in in_flight:
            if job.finish_reason is None and job.num_pending == 0:  # a chunk runs, others follow
                self._coming.update(self._keys.wanted(job))

    def is_coming(self, job: Job) -> bool:
        """Whether the job is sooner if it waits for what others are about to compute of its
        beginning. That costs it an iteration, which is the shorter for those that do not wait."""
        if not self._coming:
            return False
        num_ready = self._device.num_blocks_full(job.num_ready)
        keys = islice(self._keys.wanted(job), num_ready, None)
        num_blocks = sum(1 for _ in takewhile(self._coming.__contains__, keys))
        if num_blocks == 0:
            return False
        saved_s = self._costs.prefill_s(num_blocks * self._device.block_size)
        return saved_s >= 2 * self._costs.least_iteration_s

    def copy(self, job: Job) -> None:
        """What the job is to copy goes into blocks that it has been given."""
        first = self._device.num_blocks_full(job.num_computed)
        sources = self._sources(job)
        assert len(sources) * self._device.block_size == job.num_shared, "not all is there to copy"
        for index, source in enumerate(sources, first):
            self.copies.from_blocks.append(self._device.table(source)[index])
            self.copies.to_blocks.append(self._device.table(job.number)[index])
            self.copies.sources.add(source)

    def computes(self, job: Job, num_tokens: int) -> None:
        """When the step has run the job has so many tokens, of which others may know nothing."""
        self._beginning.append(job)
        num_blocks = self._device.num_blocks_full(num_tokens)
        self._coming.update(islice(self._keys.wanted(job), num_blocks))

    def sent(self) -> None:
        """The round's step was sent."""
        for job in self._beginning:
            self.add(job)
