"""What strategy ``proactive`` does before it is needed (FastServe §4.2).

It keeps blocks free for arrivals, and brings back the jobs that run next. While the link is idle,
it copies blocks of jobs that will leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.device_room import DeviceRoom
from fastserve_backend.kv_cache.freed_blocks import FreedBlocks
from fastserve_backend.kv_cache.holders import Holders, RoundState
from fastserve_backend.kv_cache.prefixes import Prefixes
from fastserve_backend.kv_cache.swapping import Swapping
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import TransferKind

# A job returns early only if it would belong on a device smaller by this share. Without such a
# band, a job at the border would leave and return with every change of the order above it.
_BAND = 0.1
# Most jobs on their way back early at once. With more, the link would still carry out old decisions
# after the order has changed.
_MAX_RETURNING = 2
# Arrivals and freed blocks make the next round look ahead. The order alone changes little from one
# round to the next, so otherwise one round in so many looks.
_LOOK_AHEAD_ROUNDS = 8
# Most jobs that leave early in one round, so that no decision takes long. The link takes one after
# the other anyway, and the next round goes on.
_MOST_LEAVING = 4
# Give up after so many jobs that cannot leave, because the host is full or computing again is
# cheaper. The other jobs are most likely the same.
_MOST_REFUSED = 4
# Most seconds that a write-back takes the link, since a swap-out may need it next.
_WRITE_BACK_S = 0.005
# Write-backs start when this share of the device is used, and leave this share of the host free.
_WRITE_BACK_USED = 0.5
_WRITE_BACK_HOST_FREE = 0.25
# A write-back is for one of so many jobs, those that leave first.
_WRITE_BACK_JOBS = 64
# Swapping frees blocks within about this time. So a burst is what arrives in a shorter time.
_BURST_S = 0.25
# A burst counts for so long after it.
_BURST_COUNTS_S = 60.0
# Most of the device that is kept free. More would keep out jobs that are here for jobs that may
# never come.
_MAX_SHARE = 0.25


class LookAhead:
    """Owns the reserve for arrivals, and decides when to look ahead and how far."""

    def __init__(
        self,
        tiers: TwoTierKV,
        holders: Holders,
        prefixes: Prefixes,
        swapping: Swapping,
        config: KVCacheSection,
        costs: SwapCosts,
    ) -> None:
        self._tiers = tiers
        self._holders = holders
        self._prefixes = prefixes
        self._swapping = swapping
        self._costs = costs
        self._writes_back = config.incremental and config.write_back
        self._reserve = BurstReserve(tiers.device.num_blocks)
        self._rounds_to_look = 0  # until the next look

    def on_arrival(self, job: Job, now: float) -> None:
        self._reserve.add(self._tiers.needs.most(len(job.prompt_ids)), now)
        self.on_change()

    def on_change(self) -> None:
        """Jobs came or blocks were freed: the next round looks ahead."""
        self._rounds_to_look = 0

    def on_round_end(self, state: RoundState, room: DeviceRoom) -> None:
        """Start transfers, if it is time to look ahead."""
        if self._rounds_to_look > 0:
            self._rounds_to_look -= 1
            return
        self._rounds_to_look = _LOOK_AHEAD_ROUNDS - 1
        self._swap(state, room)
        if self._writes_back:
            self._write_back(state)

    def _swap(self, state: RoundState, room: DeviceRoom) -> None:
        """Keep the reserve free, and the jobs that run next on the device: as many as fit into the
        blocks beside the reserve."""
        device, tiers = self._tiers.device, self._tiers
        reserve = self._reserve.num_blocks(state.now)
        spare = room.num_spare
        if not tiers.num_swapped_out and spare >= reserve:
            return
        border = DeviceBorder(tiers, state, device.num_blocks - reserve)
        most_returning = max(0, _MAX_RETURNING - tiers.transfers.num_of(TransferKind.SWAP_IN))
        returning = list(islice(border.inside(_BAND * device.num_blocks), most_returning))
        wanted = reserve + sum(_room_to_return(job, tiers) for job in returning)
        num_left = num_refused = 0
        freed = FreedBlocks(device, tiers.leaving)
        for job in border.outside() if spare < wanted else ():
            if not state.is_idle(job):
                continue
            if num_left == _MOST_LEAVING:
                self.on_change()
                break
            num_freed = freed.add(job.number)
            if self._swapping.swap_out(job, state, is_early=True):
                spare += num_freed
                num_left += 1
            else:
                freed.keep(job.number)
                num_refused += 1
            if spare >= wanted or num_refused == _MOST_REFUSED:
                break
        for job in returning:
            needed = _room_to_return(job, tiers)
            if not room.has_free(needed + reserve):
                break
            room.make_free(needed)
            self._swapping.swap_in(job, job.num_tokens, state)

    def _write_back(self, state: RoundState) -> None:
        """Copy full blocks of one job that will leave, while the link is idle."""
        device, host = self._tiers.device, self._tiers.host
        if (
            device.num_used - self._tiers.held.device < _WRITE_BACK_USED * device.num_blocks
            or host.num_free <= _WRITE_BACK_HOST_FREE * host.num_blocks
            or self._tiers.transfers.num_of(TransferKind.SWAP_OUT)
            or self._tiers.transfers.num_of(TransferKind.WRITE_BACK)
        ):
            return
        for job in islice(state.by_next_run(Place.DEVICE, last_first=True), _WRITE_BACK_JOBS):
            if state.is_idle(job) and (
                device.num_full_blocks(job.num_computed) > host.end(job.number)
            ):
                max_blocks = int(_WRITE_BACK_S / self._costs.link.transfer_s(True, 1))
                max_blocks = max(self._tiers.needs.num_groups, max_blocks)
                self._swapping.write_back(job, min(max_blocks, host.num_free), state)
                break


def _room_to_return(job: Job, tiers: TwoTierKV) -> int:
    """Blocks for all tokens of a swapped-out job, so that its next step can follow at once."""
    return tiers.needs.for_step(job.num_computed, job.num_tokens)


class DeviceBorder:
    """The border between the jobs that belong on the device and all others.

    All jobs with KV are sorted: first the jobs in flight and those taken in the round, then by when
    they run next. The jobs before the border need at most ``capacity`` blocks together.

    The device already knows how many blocks its jobs hold, so nothing is summed up over all jobs. A
    swapped-out job is inside if jobs behind it hold enough blocks. A job on the device is outside
    if swapped-out jobs before it need more blocks than are free. Both searches look only at as many
    jobs as hold so many blocks.
    """

    def __init__(self, tiers: TwoTierKV, state: RoundState, capacity: int) -> None:
        self._tiers = tiers
        self._state = state
        self._estimate = state.next_run_estimate
        # Blocks of all jobs on the device, less ``capacity``.
        num_of_others = tiers.num_of_ended + tiers.held.device
        self._num_here = tiers.device.num_used - num_of_others - capacity
        self._freed = FreedBlocks(tiers.device, tiers.held.jobs)
        self._last = state.by_next_run(Place.DEVICE, last_first=True)
        # The jobs that were looked at: (estimate, job, blocks that are free once it and those
        # before it have left), the last to run first.
        self._looked_at: list[tuple[tuple[float, ...], Job, int]] = []

    def inside(self, band: float) -> Iterator[Job]:
        """Swapped-out jobs that would be inside even if the capacity were ``band`` blocks smaller.
        Those that run next come first."""
        num_before = 0
        for job in self._swapped_out():
            num_before += _room_to_return(job, self._tiers)
            if not self._has_behind(job, self._num_here + num_before + band):
                return
            yield job

    def outside(self) -> Iterator[Job]:
        """Jobs on the device that are outside, the last to run first. The caller may move them
        between two of them."""
        swapped_out = self._swapped_out()
        num_before, last_before = 0, None
        num_behind, index = 0, 0
        while (looked_at := self._look_at(index)) is not None:
            estimate, job, num_freed = looked_at
            while num_before <= num_behind - self._num_here:
                before = next(swapped_out, None)
                if before is None:
                    return
                num_before += _room_to_return(before, self._tiers)
                last_before = self._estimate(before)
            if last_before is not None and last_before >= estimate:
                return
            yield job
            num_behind += num_freed
            index += 1

    def _swapped_out(self) -> Iterator[Job]:
        is_swapped_out = self._tiers.is_swapped_out
        return (job for job in self._state.by_next_run(Place.HOST) if is_swapped_out(job.number))

    def _has_behind(self, job: Job, num_blocks: float) -> bool:
        """Whether jobs on the device that run later than ``job`` hold ``num_blocks`` blocks."""
        estimate, index = self._estimate(job), 0
        while num_blocks > 0:
            looked_at = self._look_at(index)
            if looked_at is None or looked_at[0] <= estimate:
                return False
            num_blocks -= looked_at[2]
            index += 1
        return True

    def _look_at(self, index: int) -> tuple[tuple[float, ...], Job, int] | None:
        """The device's job with ``index`` jobs behind it, busy ones left out. None: there is
        none."""
        looked_at = self._looked_at
        while index >= len(looked_at):
            job = next(self._last, None)
            if job is None:
                return None
            if job.number not in self._state.busy:
                num_freed = self._freed.add(job.number)
                looked_at.append((self._estimate(job), job, num_freed))
        return looked_at[index]


class BurstReserve:
    """How many device blocks to keep free for jobs that may arrive.

    As many as the largest recent burst of arrivals needed. So the reserve grows with the rate of
    arrivals and with the length of prompts. Every operation costs O(1) amortised.
    """

    def __init__(self, num_device_blocks: int) -> None:
        self._most = int(num_device_blocks * _MAX_SHARE)
        self._burst: deque[tuple[float, int]] = deque()  # (time, blocks) of the latest _BURST_S
        self._burst_blocks = 0
        # (time, blocks of the burst that ended then), descending: the first is the largest.
        self._largest: deque[tuple[float, int]] = deque()

    def add(self, num_blocks: int, now: float) -> None:
        """A job with a prompt of ``num_blocks`` blocks arrived."""
        self._burst.append((now, num_blocks))
        self._burst_blocks += num_blocks
        while self._burst[0][0] < now - _BURST_S:
            self._burst_blocks -= self._burst.popleft()[1]
        while self._largest and self._largest[-1][1] <= self._burst_blocks:
            self._largest.pop()
        self._largest.append((now, self._burst_blocks))

    def num_blocks(self, now: float) -> int:
        """Blocks to keep free at ``now``."""
        while self._largest and self._largest[0][0] < now - _BURST_COUNTS_S:
            self._largest.popleft()
        return min(self._most, self._largest[0][1]) if self._largest else 0
