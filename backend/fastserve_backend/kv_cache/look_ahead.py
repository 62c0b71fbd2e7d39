"""What strategy ``proactive`` does before it is needed: blocks are kept free for arrivals, the jobs
that run next return early, and the idle link copies blocks of those that will leave (FastServe
§4.2)."""

from __future__ import annotations

from itertools import islice

from fastserve_backend.config import KVCacheSection
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.burst_reserve import BurstReserve
from fastserve_backend.kv_cache.device_border import DeviceBorder
from fastserve_backend.kv_cache.device_room import DeviceRoom
from fastserve_backend.kv_cache.holders import Holders
from fastserve_backend.kv_cache.prefix_cache import PrefixCache
from fastserve_backend.kv_cache.round import Round
from fastserve_backend.kv_cache.swap_costs import SwapCosts
from fastserve_backend.kv_cache.swapping import Swapping
from fastserve_backend.kv_cache.tiers import TransferKind, TwoTierKV

# Jobs return ahead of time into this share of the device less than others have to leave. Without
# such a band a job at the border would leave and return with every change of the order above it.
_BAND = 0.1
# Jobs on their way back at once, ahead of time: with more the link would still carry old decisions
# when the order changes.
_MAX_RETURNING = 2
# The order changes little from one round to the next. So it is looked at when blocks were freed or
# jobs came, and in between only each so many rounds.
_LOOK_AHEAD_ROUNDS = 8
# Jobs that leave ahead of time at once: the link takes one after the other anyhow, and no decision
# is held up by many. The next round goes on.
_MOST_LEAVING = 4
# Jobs are not asked to leave ahead of time when so many could not, for want of host memory or
# because they are better computed again: the others are of that kind too.
_MOST_REFUSED = 4
# A write-back takes the link for so long at most, since a swap-out may want it next.
_WRITE_BACK_S = 0.005
# Write-backs begin when this share of the device is used, and leave this share of the host free.
_WRITE_BACK_USED = 0.5
_WRITE_BACK_HOST_FREE = 0.25
# They are for the first to leave, of so many.
_WRITE_BACK_JOBS = 64


class LookAhead:
    """Owns the reserve for arrivals, and decides when and how far to look."""

    def __init__(
        self,
        tiers: TwoTierKV,
        holders: Holders,
        prefix_cache: PrefixCache,
        swapping: Swapping,
        room: DeviceRoom,
        config: KVCacheSection,
        costs: SwapCosts,
    ) -> None:
        self._tiers = tiers
        self._holders = holders
        self._prefix_cache = prefix_cache
        self._swapping = swapping
        self._room = room
        self._costs = costs
        self._writes_back = config.incremental and config.write_back
        self._reserve = BurstReserve(tiers.device.num_blocks)
        self._rounds_to_look = 0  # until the next look

    def arrived(self, job: Job, now: float) -> None:
        self._reserve.add(self._tiers.device.blocks_for(len(job.prompt_ids)), now)
        self.expect_change()

    def expect_change(self) -> None:
        """Jobs came or blocks were freed: the next round looks."""
        self._rounds_to_look = 0

    def look(self, this: Round) -> None:
        """To be called at the end of each round; begins transfers in some."""
        if self._rounds_to_look > 0:
            self._rounds_to_look -= 1
            return
        self._rounds_to_look = _LOOK_AHEAD_ROUNDS - 1
        self._swap(this)
        if self._writes_back:
            self._write_back(this)

    def _swap(self, this: Round) -> None:
        """Keep the reserve free, and on the device the jobs that run next (ENST order): as many as
        have all blocks but the reserve together."""
        device, tiers = self._tiers.device, self._tiers
        reserve = self._reserve.num_blocks(this.now)
        spare = self._room.num_spare
        if not tiers.num_swapped_out and spare >= reserve:
            return
        border = DeviceBorder(tiers, self._prefix_cache, this, device.num_blocks - reserve)
        most_returning = max(0, _MAX_RETURNING - tiers.num_unfinished(TransferKind.SWAP_IN))
        returning = list(islice(border.inside(_BAND * device.num_blocks), most_returning))
        wanted = reserve + sum(self._room_to_return(job) for job in returning)
        spare += self._prefix_cache.give_back(wanted - spare, this.offered)
        num_left = num_refused = 0
        for job in border.outside() if spare < wanted else ():
            if not self._holders.is_idle(job, this):
                continue
            if num_left == _MOST_LEAVING:
                self.expect_change()
                break
            num_held = device.num_held(job.number)
            if job.num_computed == 0:  # it was taken, but its step was held
                self._holders.drop(job)
                spare += num_held
            elif self._swapping.swap_out(job):
                spare += num_held
                num_left += 1
            else:
                num_refused += 1
            if spare >= wanted or num_refused == _MOST_REFUSED:
                break
        for job in returning:
            if not self._room.has(self._room_to_return(job) + reserve):
                break
            self._swapping.swap_in(job, job.num_tokens)

    def _room_to_return(self, job: Job) -> int:
        """Blocks for all tokens of a job, so that its next iteration can follow at once."""
        return self._tiers.device.blocks_for(job.num_tokens)

    def _write_back(self, this: Round) -> None:
        device, host = self._tiers.device, self._tiers.host
        if (
            device.num_used < _WRITE_BACK_USED * device.num_blocks
            or host.num_free <= _WRITE_BACK_HOST_FREE * host.num_blocks
            or self._tiers.num_unfinished(TransferKind.SWAP_OUT)
            or self._tiers.num_unfinished(TransferKind.WRITE_BACK)
        ):
            return
        for job in islice(this.by_urgency(Place.DEVICE, last_first=True), _WRITE_BACK_JOBS):
            if self._holders.is_idle(job, this) and (
                device.num_blocks_full(job.num_computed) > host.num_held(job.number)
            ):
                max_blocks = max(1, int(_WRITE_BACK_S / self._costs.transfer_s(True, 1)))
                self._swapping.write_back(job, min(max_blocks, host.num_free))
                break
