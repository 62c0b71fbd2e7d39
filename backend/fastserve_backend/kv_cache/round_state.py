"""What is known about the jobs in one round, and what is promised to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Protocol

from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.tiers import Transfer, TwoTierKV
from fastserve_backend.scheduler.base import NextRunEstimate


class RunningOrder(Protocol):
    """What the KV cache asks the scheduling policy; ``scheduler.base.Policy`` says more."""

    def next_run_estimate(self, now: float) -> NextRunEstimate: ...

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        """Jobs whose KV was at ``place`` when the round started, in order of ``estimate``."""
        ...

    def placed(self, job: Job) -> None:
        """The job's ``place`` has changed."""
        ...

    def has_turn(self, job: Job) -> bool: ...


class RoundState:
    """The facts of one round. ``Round`` decides by them and changes them.

    Args:
        in_flight: jobs of unfinished steps, which keep what they have.
        going_on: as for ``KVManager.start_round``.
        copy_sources: jobs from which this round's step copies blocks; grows during the round.
    """

    def __init__(
        self,
        tiers: TwoTierKV,
        order: RunningOrder,
        now: float,
        in_flight: Collection[int],
        going_on: Collection[int] | None,
        copy_sources: Collection[int],
    ) -> None:
        self.now = now
        self.is_ahead = going_on is not None
        """The running step counts as ended, although it has not."""
        self.running = set(going_on or ())
        """Jobs of the running step that may be offered for the step after it."""
        self.busy = set(in_flight)
        """Jobs in flight, and jobs taken in this round."""
        self.offered: set[int] = set()
        """Jobs that lose no blocks to jobs offered later."""
        self.num_promised = 0
        """Device blocks for which jobs offered in this round wait. Nobody offered later gets
        them."""
        self.transfers: list[Transfer] = []
        """Transfers that this round starts, in order."""
        self._tiers = tiers
        self._order = order
        self._copy_sources = copy_sources

    @cached_property
    def next_run_estimate(self) -> NextRunEstimate:
        """The policy's estimate of when a job runs next."""
        return self._order.next_run_estimate(self.now)

    def by_next_run(self, place: Place, *, last_first: bool = False) -> Iterator[Job]:
        """Jobs whose KV was at ``place`` when the round started, those that run next first, or
        those that run last."""
        return self._order.by_next_run(place, self.next_run_estimate, last_first=last_first)

    @cached_property
    def last_on_device(self) -> Iterator[Job]:
        """Jobs on the device, those that run last first. An iterator: it yields each job once in
        the round."""
        return self.by_next_run(Place.DEVICE, last_first=True)

    @cached_property
    def first_on_device(self) -> Iterator[Job]:
        """Jobs on the device, those that run next first; once in the round, too."""
        return self.by_next_run(Place.DEVICE)

    @property
    def num_spare(self) -> int:
        """Device blocks that are free once the unfinished swap-outs end, without promised ones.
        Negative: more blocks are promised than will be free."""
        return self._tiers.device.num_free + self._tiers.num_leaving - self.num_promised

    def has_free(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` device blocks are free now, without promised ones."""
        return num_blocks + self.num_promised <= self._tiers.device.num_free

    def may_leave(self, job: Job) -> bool:
        """Whether the job has device blocks that no step, no copy and no offered job uses. The
        running step counts as ended if the round is ahead of it."""
        number = job.number
        if number in self.offered or number in self._copy_sources:
            return False
        if number in self.running:
            return True
        return (
            number not in self.busy
            and not self._tiers.is_read(number)
            and self._tiers.transfer(number) is None
            and self._tiers.device.num_held(number) > 0
        )

    def is_idle(self, job: Job) -> bool:
        """Whether the job may leave now, since it is not in the running step either."""
        return job.number not in self.running and self.may_leave(job)
