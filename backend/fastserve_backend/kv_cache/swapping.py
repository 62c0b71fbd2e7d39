"""Jobs' KV goes to the host and comes back: whether that pays, and for whom the host has room."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from fastserve_backend.config import KVCacheSection
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.holders import Holders
from fastserve_backend.kv_cache.round import Round
from fastserve_backend.kv_cache.shared_prefixes import SharedPrefixes
from fastserve_backend.kv_cache.swap_costs import SwapCosts
from fastserve_backend.kv_cache.tiers import Transfer, TransferKind, TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters

_log = logging.getLogger(__name__)


class Swapping:
    """Begins transfers and takes note of their ends; counts swaps of jobs."""

    def __init__(
        self,
        tiers: TwoTierKV,
        holders: Holders,
        shared: SharedPrefixes,
        config: KVCacheSection,
        costs: SwapCosts,
        counters: EngineCounters,
    ) -> None:
        self._tiers = tiers
        self._holders = holders
        self._shared = shared
        self._strategy = config.strategy
        self._costs = costs
        self._counters = counters

    def begin(self, this: Round) -> None:
        """A round."""
        self._round = this
        self._with_copies: Iterator[Job] | None = None  # from the first shortage on the host on
        self.begun: list[Transfer] = []
        """In this round."""

    def swap_out(self, job: Job) -> bool:
        """Begin to move an idle job's KV to the host, unless it is better computed again or the
        host has no room. Returns whether the job leaves."""
        if self._strategy == "recompute" or job.num_computed == 0:
            return False
        if self._strategy != "reactive" and not self._is_cheaper(job):
            return False
        if not self._make_host_room(job):
            return False
        num_blocks = self._tiers.device.blocks_for(job.num_computed)
        num_copied = self._tiers.num_to_copy(job.number, job.num_computed)
        self._counters.swap_avoided_bytes += (num_blocks - num_copied) * self._costs.block_bytes
        job.num_swaps += 1
        self._shared.remove(job)
        transfer = self._tiers.swap_out(job.number, job.num_computed)
        self._holders.moved(job)
        if transfer is not None:
            self.begun.append(transfer)
        return True

    def can_swap_out(self, jobs: Sequence[Job]) -> bool:
        """Whether all of these idle jobs can leave, and none computes its KV again for that."""
        jobs = [job for job in jobs if job.num_computed]
        if not all(self._is_cheaper(job) for job in jobs):
            return False
        host = self._tiers.host
        missing = sum(host.missing(job.number, job.num_computed) for job in jobs)
        own = sum(host.num_held(job.number) for job in jobs)
        return missing <= host.num_free or missing <= host.num_free + self._tiers.num_copies - own

    def swap_in(self, job: Job, room_for: int) -> None:
        """Bring a swapped-out job back, with blocks for so many tokens, which must be free."""
        self.begun.append(self._tiers.swap_in(job.number, room_for))
        self._holders.moved(job)

    def write_back(self, job: Job, max_blocks: int) -> None:
        """Copy full blocks of an idle job to the host, which must have room, ahead of time."""
        transfer = self._tiers.write_back(job.number, job.num_computed, max_blocks)
        if transfer is not None:
            self.begun.append(transfer)

    def ended(self, job_number: int, *, succeeded: bool, seconds: float) -> None:
        """The job's transfer has; it took the link ``seconds``."""
        transfer = self._tiers.transfer(job_number)
        assert transfer is not None
        if succeeded:
            num_blocks = len(transfer.device_blocks)
            num_bytes = num_blocks * self._costs.block_bytes
            self._costs.observe(transfer.kind.is_out, num_blocks, seconds)
            if transfer.kind.is_out:
                self._counters.swap_out_bytes += num_bytes
            else:
                self._counters.swap_in_bytes += num_bytes
        self._tiers.finish(job_number, succeeded=succeeded)
        job = self._holders.get(job_number)
        if job is None:  # it has ended
            return
        self._holders.moved(job)
        if succeeded and transfer.kind is TransferKind.SWAP_IN:
            self._shared.add(job)
        elif not succeeded and transfer.kind is not TransferKind.WRITE_BACK:
            _log.warning("job %s computes its KV again: its %s failed", job.id, transfer.kind.value)
            self._holders.lost(job)

    def _is_cheaper(self, job: Job) -> bool:
        num_copied = self._tiers.num_to_copy(job.number, job.num_computed)
        return self._costs.swap_is_cheaper(
            job,
            blocks_out=num_copied + self._tiers.num_leaving,
            blocks_in=self._tiers.device.blocks_for(job.num_computed),
            num_running=len(self._round.busy),
        )

    def _make_host_room(self, job: Job) -> bool:
        """Whether the host can hold the job's KV; forgets copies of jobs on the device for it,
        those first that will not leave soon."""
        host = self._tiers.host
        missing = host.missing(job.number, job.num_computed)
        if missing <= host.num_free:
            return True
        if host.num_held(job.number) + missing > host.num_free + self._tiers.num_copies:
            return False
        if self._with_copies is None:
            here = self._round.by_urgency(Place.DEVICE)
            self._with_copies = (other for other in here if self._tiers.has_copy(other.number))
        for other in self._with_copies:
            if other is not job:
                self._tiers.forget_host(other.number)
                if missing <= host.num_free:
                    return True
        return False
