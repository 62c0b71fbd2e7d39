"""KV of earlier jobs for later jobs that begin with the same tokens.

The keys and values of a full block depend on its tokens and on those before it alone. So a block
that is free again keeps what it holds until it is needed: a job whose tokens begin in the same way
takes it over and computes what comes after. As ever a block is one job's at a time.
"""

from __future__ import annotations

from collections.abc import Container

from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys


class PrefixCache:
    """Finds what the device's free blocks kept, and says what they are to keep.

    A job that is to run recalls blocks. Those that turn out not to run give them back at the end of
    the round, so that a job that waits keeps nothing from a more urgent one. Changes
    ``num_computed`` and ``num_shared`` of such jobs.
    """

    def __init__(self, device: BlockPool, keys: PrefixKeys) -> None:
        self._device = device
        self._keys = keys
        self._recalled: dict[int, Job] = {}

    @property
    def num_recalled(self) -> int:
        """Blocks that jobs recalled which have not run since."""
        return sum(map(self._device.num_held, self._recalled))

    def num_kept_tokens(self, job: Job) -> int:
        """Of the job's first tokens, those that free blocks hold."""
        return self._device.num_kept(self._keys.wanted(job)) * self._device.block_size

    def recall(self, job: Job) -> None:
        """Give a job, which has no KV of its own, the blocks that hold its first tokens."""
        if job.number in self._recalled:
            return
        num_blocks = self._device.recall(job.number, self._keys.wanted(job))
        if num_blocks:
            job.num_computed = num_blocks * self._device.block_size
            self._recalled[job.number] = job

    def used(self, job: Job) -> int:
        """The job is to run; returns how many tokens it recalled for that."""
        return job.num_computed if self.forget(job) else 0

    def forget(self, job: Job) -> bool:
        """What the job has is its own from now on. Returns whether it had recalled it."""
        return self._recalled.pop(job.number, None) is not None

    def give_back(self, num_blocks: int, but_for: Container[int]) -> int:
        """Free so many blocks of jobs that recalled them, the latest first, or all but those of
        some jobs. Returns how many, which may be more; they keep what they hold."""
        given, jobs = 0, []
        for number, job in reversed(self._recalled.items()):
            if given >= num_blocks:
                break
            if number not in but_for:
                given += self._device.num_held(number)
                jobs.append(job)
        for job in jobs:
            self._give_back(job)
        return given

    def give_back_unused(self) -> None:
        """Free the blocks of all jobs that recalled some and have not run since."""
        for job in list(self._recalled.values()):
            self._give_back(job)

    def give_back_of(self, job: Job) -> None:
        """Free the blocks that the job recalled, if it did: it is not to run."""
        if job.number in self._recalled:
            self._give_back(job)

    def _give_back(self, job: Job) -> None:
        self._device.release(job.number, self.kept(job))
        self.forget(job)
        job.num_shared += job.num_computed  # the policy still counts on it
        job.num_computed = 0

    def kept(self, job: Job) -> list[bytes]:
        """Keys of the full blocks that the job has on the device and leaves to others."""
        if not self._device.num_held(job.number) or job.finish_reason is FinishReason.ERROR:
            return []
        return list(self._keys.held(job))
