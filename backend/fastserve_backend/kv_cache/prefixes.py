"""KV that a job need not compute, because other jobs began with the same tokens.

The keys and values of a full block depend only on the block's tokens and on all tokens before it.
So equal prefixes have equal KV. A job refers to the blocks of others with its ``cache_salt``: those
of running jobs, and those that earlier jobs have left in the cache.

A layer with a window needs only the blocks before the job's first own token that this token sees.
The blocks before those may be gone: a job gives them up when it has gone on. So a prefix is of use
if layers without a window have all its blocks, and layers with a window the last ones. The longest
such prefix is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first blocks of a job that it may get from others."""

    keys: Sequence[bytes] = ()
    """Of the blocks of a group."""
    parts: Sequence[range] = ()
    """For each kind of layers which of these blocks the job refers to."""


NO_HIT = PrefixHit()


class Prefixes:
    """Publishes what jobs compute, and finds it for others.

    Changes a job's ``num_shared``: the tokens whose blocks it gets from others when it may run.
    """

    def __init__(self, device: BlockPool, keys: PrefixKeys, costs: SwapCosts) -> None:
        self.is_on = keys.is_on
        self._device = device
        self._keys = keys
        self._costs = costs
        self._num_published: dict[int, int] = {}  # job → blocks of a group

    def for_round(self, prefilling: Iterable[Job]) -> RoundPrefixes:
        """
        Args:
            prefilling: jobs of unfinished steps that are not offered in the new round.
        """
        return RoundPrefixes(self, self._device, self._keys, self._costs, prefilling)

    def held_keys(self, job: Job) -> Sequence[bytes]:
        """Of the job's first blocks of a group, as far as others may use them."""
        return self._keys.held(job) if self.is_on else ()

    def publish(self, job: Job) -> None:
        """Let others refer to what the job has computed, in all steps that are sent from now on."""
        if self.is_on:
            keys = self._keys.held(job)
            start = self._num_published.get(job.number, 0)
            self._device.publish(job.number, keys, start)
            self._num_published[job.number] = len(keys)

    def before_leaving(self, job: Job) -> None:
        """The job is about to give up its device blocks: their content stays in the cache. That of
        a job that failed is wrong, and nobody gets it any more."""
        if job.finish_reason is FinishReason.ERROR:
            self._device.withdraw(job.number)
        else:
            self.publish(job)
        self.on_left(job)

    def on_left(self, job: Job) -> None:
        """The job has no device blocks any more, or will lose those that it has."""
        self._num_published.pop(job.number, None)
        job.num_shared = 0

    def forget(self, job: Job) -> None:
        """The job ended."""
        self._num_published.pop(job.number, None)
        self._keys.forget(job)

    def find(self, job: Job) -> PrefixHit:
        """What a job that has no blocks may get from others. Sets its ``num_shared``."""
        hit = find_prefix(self._device, self._keys.wanted(job)) if self.is_on else NO_HIT
        job.num_shared = len(hit.keys) * self._device.block_size
        return hit

    def find_on_host(self, job: Job, host: BlockPool) -> PrefixHit:
        """What the host has of the first tokens of a job that has no blocks."""
        return find_prefix(host, self._keys.wanted(job)) if self.is_on else NO_HIT


def find_prefix(pool: BlockPool, keys: Sequence[bytes]) -> PrefixHit:
    """The longest prefix of a job that the pool has.

    Args:
        keys: of the job's first blocks of a group.
    """
    length = len(keys)
    parts: list[range] = []
    while len(parts) < len(pool.kinds):
        part = _last_blocks(pool, len(parts), keys, length)
        parts.append(part)
        if part.stop < length:  # all kinds again, for a shorter prefix
            length, parts = part.stop, []
    return PrefixHit(keys[:length], parts)


def _last_blocks(pool: BlockPool, kind: int, keys: Sequence[bytes], length: int) -> range:
    """The blocks that layers of this kind need for a prefix of ``length`` blocks. If one of them is
    missing, the range stops where a shorter prefix does at most."""
    if pool.kinds[kind].window is None:
        found = takewhile(lambda key: pool.has(key, kind), keys[:length])
        return range(sum(1 for _ in found))
    seen = pool.kinds[kind].first_seen(length * pool.block_size, pool.block_size)
    for block in range(length - 1, seen - 1, -1):
        if not pool.has(keys[block], kind):
            return range(block)
    return range(seen, length)


class RoundPrefixes:
    """The prefixes that the jobs of one round get and compute."""

    def __init__(
        self,
        prefixes: Prefixes,
        device: BlockPool,
        keys: PrefixKeys,
        costs: SwapCosts,
        prefilling: Iterable[Job],
    ) -> None:
        self.num_cached_tokens = 0
        """Tokens that the step's jobs need not compute."""
        self._prefixes = prefixes
        self._device = device
        self._keys = keys
        self._costs = costs
        self._hits: dict[int, PrefixHit] = {}  # by job, what it gets if it runs
        self._to_publish: list[Job] = []  # when the step is sent
        # Keys of blocks that this round's step computes, or a prefill in flight.
        self._coming: set[bytes] = set()
        for job in prefilling:
            if job.finish_reason is None and job.num_pending == 0:  # a chunk runs, others follow
                self._coming.update(self._keys.of_prefill(job))

    def find(self, job: Job) -> PrefixHit:
        """Find the prefix of a job that has no blocks."""
        hit = self._hits[job.number] = self._prefixes.find(job)
        return hit

    def hit(self, job: Job) -> PrefixHit:
        """What the latest ``find`` has found."""
        return self._hits.get(job.number, NO_HIT)

    def num_coming(self, job: Job) -> int:
        """Blocks of a group, behind what the job gets now, that others are about to compute. 0 if
        it does not pay to wait for them.

        Waiting costs the job a step, which is shorter for all others without its prefill.
        """
        if not self._coming:
            return 0
        num_ready = self._device.num_full_blocks(job.num_ready)
        keys = islice(self._keys.wanted(job), num_ready, None)
        num_blocks = sum(1 for _ in takewhile(self._coming.__contains__, keys))
        saved_s = self._costs.prefill_s(num_blocks * self._device.block_size) if num_blocks else 0.0
        return num_blocks if saved_s >= 2 * self._costs.least_iteration_s else 0

    def on_taken(self, job: Job, num_tokens: int) -> None:
        """The job has blocks for its next ``num_tokens`` tokens: publish what it computes once the
        step is sent."""
        self.num_cached_tokens += job.num_shared
        self._to_publish.append(job)
        num_blocks = self._device.num_full_blocks(job.num_ready + num_tokens)
        self._coming.update(self._keys.of_prefill(job)[:num_blocks])

    def publish_all(self) -> None:
        """The round's step was sent: publish what its jobs compute."""
        for job in self._to_publish:
            self._prefixes.publish(job)
