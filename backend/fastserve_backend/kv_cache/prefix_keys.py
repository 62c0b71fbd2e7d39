"""Keys of the beginnings of jobs: equal ones have equal KV, whoever computes it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from fastserve_backend.config import KVCacheSection
from fastserve_backend.job import Job

_KEY_BYTES = 32


class PrefixKeys:
    """For each full block of a job's tokens a key of its tokens and all before them, made when it
    is asked for and kept until the job is forgotten. None where prefixes are of no use.

    A cryptographic hash, as whoever found two beginnings of one key would get an answer to the
    other one.
    """

    def __init__(self, config: KVCacheSection, block_size: int) -> None:
        self.block_size = block_size
        # Strategy defer promises blocks to jobs before they run, and takes none from anyone.
        self.is_on = config.prefix_caching and config.strategy != "defer"
        self._swaps_are_lossy = config.swaps_are_lossy
        self._keys: dict[int, list[bytes]] = {}

    def wanted(self, job: Job) -> Iterator[bytes]:
        """Of what the job may have from others: all its tokens but one at most, as for its next one
        it has to compute something."""
        return self._of(job, job.num_tokens - 1)

    def held(self, job: Job) -> Iterator[bytes]:
        """Of what the job has on the device, all that it has computed, and others may have."""
        if self._swaps_are_lossy and job.num_swaps:
            return iter(())
        # A step sent ahead may have computed a token that a stop word made void, which is not here.
        num_tokens = len(job.prompt_ids) + len(job.output_ids)
        return self._of(job, min(job.num_computed, num_tokens))

    def forget(self, job: Job) -> None:
        self._keys.pop(job.number, None)

    def _of(self, job: Job, num_tokens: int) -> Iterator[bytes]:
        num_blocks = num_tokens // self.block_size
        if not self.is_on or num_blocks == 0:
            return
        keys = self._keys.setdefault(job.number, [])
        for block in range(num_blocks):
            if block == len(keys):
                before = keys[-1] if keys else b""
                tokens = _tokens(job, block * self.block_size, self.block_size)
                keys.append(blake2b(before + tokens.tobytes(), digest_size=_KEY_BYTES).digest())
            yield keys[block]


def _tokens(job: Job, start: int, count: int) -> array[int]:
    """So many of the prompt's and the output's tokens."""
    stop, prompt_len = start + count, len(job.prompt_ids)
    if stop <= prompt_len:
        return job.prompt_ids[start:stop]
    return job.prompt_ids[start:] + job.output_ids[max(0, start - prompt_len) : stop - prompt_len]
