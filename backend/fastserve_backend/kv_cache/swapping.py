"""Swaps between the tiers: whether a swap pays, and which copies make room for it on the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.freed_blocks import FreedBlocks
from fastserve_backend.kv_cache.holders import Holders, RoundState
from fastserve_backend.kv_cache.prefixes import Prefixes, PrefixHit
from fastserve_backend.kv_cache.sessions import HeldSessions
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import TransferKind
from fastserve_backend.metrics.counters import EngineCounters

_log = logging.getLogger(__name__)


class Swapping:
    """Starts transfers in a round, and handles their ends. Counts swaps of jobs and their bytes."""

    def __init__(
        self,
        tiers: TwoTierKV,
        holders: Holders,
        prefixes: Prefixes,
        config: KVCacheSection,
        costs: SwapCosts,
        counters: EngineCounters,
        sessions: HeldSessions,
    ) -> None:
        self._tiers = tiers
        self._holders = holders
        self._prefixes = prefixes
        self._strategy = config.strategy
        self._swaps_are_lossy = config.swaps_are_lossy
        self._costs = costs
        self._counters = counters
        self._sessions = sessions

    def swap_out(self, job: Job, state: RoundState, *, is_early: bool = False) -> bool:
        """Start to move an idle job's KV to the host, unless computing it again is cheaper or the
        host has no room. Returns whether the job leaves.

        Args:
            is_early: nobody needs the job's blocks yet, so nobody's KV is dropped for it.
        """
        if self._strategy == "recompute" or job.num_computed == 0:
            return False
        if self._strategy != "reactive" and not self._is_cheaper(job, state):
            return False
        if not self._make_host_room(job, state, may_drop=not is_early):
            return False
        keys = self._prefixes.held_keys(job)
        num_avoided = self._tiers.needs.computed(job.num_computed)
        self._prefixes.before_leaving(job)
        job.num_swaps += 1
        transfer = self._tiers.swap_out(job.number, job.num_computed, keys)
        self._holders.on_moved(job)
        if transfer is not None:
            num_avoided -= len(transfer.device_blocks)
            state.transfers.append(transfer)
        self._counters.swap_avoided_bytes += num_avoided * self._costs.block_bytes
        return True

    def can_swap_out_for(self, job: Job, leaving: Sequence[Job], state: RoundState) -> bool:
        """Whether all of these idle jobs that are as urgent as ``job`` can be swapped out. None of
        them has to compute again then, but less urgent jobs may have to."""
        priority = job.effective_priority
        kept = [one for one in leaving if one.num_computed and one.effective_priority <= priority]
        if not all(self._is_cheaper(one, state) for one in kept):
            return False
        host = self._tiers.host
        missing = sum(map(self._missing_on_host, kept)) - host.num_free
        missing -= self._tiers.held.idle_host
        own = sum(host.num_alone(one.number) for one in kept)
        shortage = missing - (self._tiers.num_copies - own)
        return (
            missing <= 0
            or shortage <= 0
            or len(self._less_urgent_on_host(job, shortage, state)) > 0
        )

    def missing_to_return(self, job: Job, room_for: int) -> int:
        """Free device blocks that a swapped-out job takes, with blocks for ``room_for`` tokens."""
        keys = self._prefixes.held_keys(job)
        return self._tiers.missing_to_return(job.number, room_for, keys)

    def swap_in(self, job: Job, room_for: int, state: RoundState) -> None:
        """Start to bring a swapped-out job back, with blocks for ``room_for`` tokens. These must be
        free. If the device has all its KV, the job is there at once."""
        keys = self._prefixes.held_keys(job)
        transfer = self._tiers.swap_in(job.number, room_for, keys)
        self._holders.on_moved(job)
        if transfer is not None:
            state.transfers.append(transfer)
        else:
            self._prefixes.publish(job)

    def refer_on_host(self, job: Job, on_device: PrefixHit) -> None:
        """Let a job without KV begin with what the host has of its first tokens, if that is more
        than what is on the device, and copying it takes less time than computing it. It is like a
        job that was swapped out then.

        Args:
            on_device: what the job finds there.
        """
        if self._strategy not in ("reactive", "proactive") or self._swaps_are_lossy:
            return
        hit = self._prefixes.find_on_host(job, self._tiers.host)
        num_tokens = len(hit.keys) * self._tiers.host.block_size
        num_more = num_tokens - len(on_device.keys) * self._tiers.host.block_size
        num_blocks = self._tiers.needs.computed(max(0, num_more))
        copy_s = self._costs.link.transfer_s(False, num_blocks)
        if num_more <= 0 or copy_s > self._costs.prefill_s(num_more):
            return
        self._tiers.refer_on_host(job.number, hit.keys, hit.parts)
        self._counters.prefix_cached_tokens += num_tokens
        self._holders.add(job, num_tokens)

    def write_back(self, job: Job, max_blocks: int, state: RoundState) -> None:
        """Start to copy full blocks of an idle job to the host, which must have room."""
        keys = self._prefixes.held_keys(job)
        transfer = self._tiers.write_back(job.number, job.num_computed, max_blocks, keys)
        if transfer is not None:
            state.transfers.append(transfer)

    def on_transfer_finished(self, job_number: int, *, succeeded: bool, seconds: float) -> None:
        """The job's transfer has ended. It took the link ``seconds``."""
        transfer = self._tiers.transfers.of(job_number)
        assert transfer is not None
        if succeeded:
            num_blocks = len(transfer.device_blocks)
            num_bytes = num_blocks * self._costs.block_bytes
            self._costs.link.observe(transfer.kind.is_out, num_blocks, seconds)
            if transfer.kind.is_out:
                self._counters.swap_out_bytes += num_bytes
            else:
                self._counters.swap_in_bytes += num_bytes
        self._tiers.finish(job_number, succeeded=succeeded)
        job = self._holders.get(job_number)
        if job is None:  # it has ended
            return
        self._holders.on_moved(job)
        if succeeded and transfer.kind is TransferKind.SWAP_IN:
            self._prefixes.publish(job)
        elif not succeeded and transfer.kind is not TransferKind.WRITE_BACK:
            _log.warning("job %s computes its KV again: its %s failed", job.id, transfer.kind.value)
            self._holders.on_lost(job)

    def _is_cheaper(self, job: Job, state: RoundState) -> bool:
        keys = self._prefixes.held_keys(job)
        num_copied = self._tiers.num_to_copy(job.number, job.num_computed, keys)
        # What others have too stays on the device, most likely until the job is back.
        device = self._tiers.device
        num_held, num_alone = device.num_held(job.number), device.num_alone(job.number)
        return self._costs.swap_is_cheaper(
            job,
            num_lost=job.num_computed * num_alone // num_held,
            blocks_out=num_copied + self._tiers.transfers.blocks_of(TransferKind.SWAP_OUT),
            blocks_in=min(num_alone, self._tiers.needs.computed(job.num_computed)),
            num_running=len(state.busy),
        )

    def _missing_on_host(self, job: Job) -> int:
        """Free host blocks that the job takes when it is swapped out."""
        keys = self._prefixes.held_keys(job)
        return self._tiers.missing_on_host(job.number, job.num_computed, keys)

    def _make_host_room(self, job: Job, state: RoundState, *, may_drop: bool) -> bool:
        """Free host blocks until the job's KV fits, and return whether it does.

        The freed blocks are first those of sessions, then copies of jobs on the device. Jobs that
        run next lose theirs first, since they will not leave soon. If those are too few, less
        urgent jobs compute again.
        """
        host = self._tiers.host
        missing = self._missing_on_host(job)
        if missing <= host.num_free:
            return True

        def fits() -> bool:
            # What was freed may have been of use to the job, so that it needs more now.
            return missing <= host.num_free and self._missing_on_host(job) <= host.num_free

        self._sessions.free_host(missing)
        if fits():
            return True
        copies_left = self._tiers.num_copies - host.num_alone(job.number)
        shortage = missing - host.num_free - copies_left
        dropped: Sequence[Job] = ()
        if shortage > 0:
            dropped = self._less_urgent_on_host(job, shortage, state) if may_drop else ()
            if not dropped:
                return False
        for other in state.first_on_device:
            if other is not job and self._tiers.has_copy(other.number):
                self._tiers.forget_host(other.number)
                if fits():
                    return True
        for other in dropped:
            self._holders.drop(other)
        return fits()

    def _less_urgent_on_host(self, job: Job, num_blocks: int, state: RoundState) -> Sequence[Job]:
        """Less urgent jobs whose KV takes ``num_blocks`` of the host, the last to run first. None
        if all of them take fewer."""
        found: list[Job] = []
        host = self._tiers.host
        freed = FreedBlocks(host, self._tiers.copies)
        if self._tiers.has_copy(job.number):
            freed.keep(job.number)
        for other in state.less_urgent(job, Place.HOST):
            if self._tiers.is_swapped_out(other.number):
                found.append(other)
                num_blocks -= freed.add(other.number)
                if num_blocks <= 0:
                    return found
        return ()
