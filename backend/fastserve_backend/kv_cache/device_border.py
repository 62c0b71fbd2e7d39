"""Which jobs belong on the device: those that run next, as many as it has blocks for."""

from __future__ import annotations

from collections.abc import Iterator

from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.prefix_cache import PrefixCache
from fastserve_backend.kv_cache.round import Round
from fastserve_backend.kv_cache.tiers import TwoTierKV


class DeviceBorder:
    """Of all jobs with KV in order of urgency, those before the border have ``capacity`` blocks
    together. Jobs in flight and those taken in the round come before all others.

    Nothing is summed up over all jobs, as it is known what the device holds. A swapped-out job is
    inside if enough of that is behind it. A job on the device is outside if swapped-out jobs
    before it need more than is free. Both look at no more jobs than have so many blocks.
    """

    def __init__(
        self, tiers: TwoTierKV, prefix_cache: PrefixCache, this: Round, capacity: int
    ) -> None:
        self._tiers = tiers
        self._round = this
        self._urgency = this.urgency()
        self._num_here = (
            tiers.device.num_used - tiers.num_of_ended - prefix_cache.num_recalled - capacity
        )
        """Blocks of all jobs on the device, less ``capacity``."""
        self._last = this.by_urgency(Place.DEVICE, last_first=True)
        # Those that were looked at: (urgency, job, its blocks), the last to run first.
        self._looked_at: list[tuple[tuple[float, float], Job, int]] = []

    def inside(self, band: float) -> Iterator[Job]:
        """Swapped-out jobs so far inside that there is room for ``band`` blocks beside them, the
        soonest to run first."""
        num_before = 0
        for job in self._swapped_out():
            num_before += self._room_to_return(job)
            if not self._has_behind(job, self._num_here + num_before + band):
                return
            yield job

    def outside(self) -> Iterator[Job]:
        """Jobs on the device that are outside, the last to run first. They may move meanwhile."""
        swapped_out = self._swapped_out()
        num_before, last_before = 0, None
        num_behind, index = 0, 0
        while (looked_at := self._look_at(index)) is not None:
            urgency, job, num_held = looked_at
            while num_before <= num_behind - self._num_here:
                before = next(swapped_out, None)
                if before is None:
                    return
                num_before += self._room_to_return(before)
                last_before = self._urgency(before)
            if last_before is not None and last_before >= urgency:
                return
            yield job
            num_behind += num_held
            index += 1

    def _swapped_out(self) -> Iterator[Job]:
        is_swapped_out = self._tiers.is_swapped_out
        return (job for job in self._round.by_urgency(Place.HOST) if is_swapped_out(job.number))

    def _has_behind(self, job: Job, num_blocks: float) -> bool:
        """Whether jobs on the device that run later have so many blocks."""
        urgency, index = self._urgency(job), 0
        while num_blocks > 0:
            looked_at = self._look_at(index)
            if looked_at is None or looked_at[0] <= urgency:
                return False
            num_blocks -= looked_at[2]
            index += 1
        return True

    def _look_at(self, index: int) -> tuple[tuple[float, float], Job, int] | None:
        """The last job on the device to run, or the one before it, …; None: there is none."""
        looked_at = self._looked_at
        while index >= len(looked_at):
            job = next(self._last, None)
            if job is None:
                return None
            if job.number not in self._round.busy:
                num_held = self._tiers.device.num_held(job.number)
                looked_at.append((self._urgency(job), job, num_held))
        return looked_at[index]

    def _room_to_return(self, job: Job) -> int:
        return self._tiers.device.blocks_for(job.num_tokens)
