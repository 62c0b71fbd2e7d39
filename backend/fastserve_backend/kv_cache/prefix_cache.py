"""KV of earlier jobs for later jobs that begin with the same tokens.

The keys and values of a full block depend on its tokens and on those before them alone. So a block
that is free again keeps what it holds until it is needed: a job whose tokens begin in the same way
takes it over and computes what comes after. As ever a block is one job's at a time. Jobs that run
beside each other have copies, which their successors find.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator
from hashlib import blake2b

from fastserve_backend.config import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.blocks import BlockPool

_KEY_BYTES = 32


def prefix_keys(token_ids: array[int], num_tokens: int, block_size: int) -> Iterator[bytes]:
    """For each block that the first ``num_tokens`` of the tokens fill a key of its tokens and all
    before them.

    A cryptographic hash, as whoever found two beginnings of one key would get an answer to the
    other one.
    """
    key = b""
    last_start = min(num_tokens, len(token_ids)) - block_size
    for start in range(0, last_start + 1, block_size):
        tokens = token_ids[start : start + block_size].tobytes()
        key = blake2b(key + tokens, digest_size=_KEY_BYTES).digest()
        yield key


class PrefixCache:
    """Finds what the device's free blocks kept, and says what they are to keep.

    Owns the blocks of jobs that recalled some and have not run since: these go before any job loses
    KV of its own. Changes ``num_computed`` of such jobs.
    """

    def __init__(self, device: BlockPool, config: KVCacheSection) -> None:
        self._device = device
        # Strategy defer promises blocks to jobs before they run, and takes none from anyone.
        self._is_on = config.prefix_caching and config.strategy != "defer"
        self._swaps_are_lossy = config.host_dtype != "same"
        self._recalled: dict[int, Job] = {}

    def recall(self, job: Job) -> None:
        """Give a job, which has no KV of its own, the blocks that hold its first tokens, all tokens
        but one at most: for its next one it has to compute something."""
        if not self._is_on or job.number in self._recalled:
            return
        block_size = self._device.block_size
        keys = prefix_keys(_tokens(job), job.num_tokens - 1, block_size)
        num_blocks = self._device.recall(job.number, keys)
        if num_blocks:
            job.num_computed = num_blocks * block_size
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
            self._device.release(job.number, self.keys(job))
            self.forget(job)
            job.num_computed = 0
        return given

    def keys(self, job: Job) -> list[bytes]:
        """Of the full blocks that the job has on the device and leaves to others."""
        if (
            not self._is_on
            or not self._device.num_held(job.number)
            or job.finish_reason is FinishReason.ERROR
            or (self._swaps_are_lossy and job.num_swaps)
        ):
            return []
        # A step sent ahead may have computed a token that a stop word made void, which is not here.
        return list(prefix_keys(_tokens(job), job.num_computed, self._device.block_size))


def _tokens(job: Job) -> array[int]:
    return job.prompt_ids + job.output_ids if job.output_ids else job.prompt_ids
