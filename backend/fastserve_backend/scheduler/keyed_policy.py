"""The base of all policies that keep their jobs in one list, sorted by a key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Self

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import BatchLimits, Scheduled
from fastserve_backend.scheduler.ordered_jobs import OrderedJobs, SplitOrder
from fastserve_backend.scheduler.policy_context import PolicyContext
from fastserve_backend.scheduler.walk import MergedWalk, Walk


class KeyedPolicy:
    """At every token, the job with the smallest key runs first; of equal ones, the oldest.

    A job keeps its first key, unless a subclass moves it. Walking costs O(jobs walked). Adding and
    removing cost what they cost in ``OrderedJobs``.
    """

    name: str
    num_demotions = 0
    quanta_s = (None,)

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._jobs = SplitOrder(OrderedJobs)

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        return cls(context.limits)

    @property
    def num_promotions(self) -> int:
        return 0

    def key(self, job: Job) -> float:
        """The job's current sort key."""
        raise NotImplementedError

    def has_turn(self, job: Job) -> bool:
        return False

    def add(self, job: Job, now: float) -> None:
        self._jobs.add(job, self.key(job))

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        return MergedWalk(lambda place: self._jobs.part(place).items())

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        return self.limits.for_load(num_prompts, num_decodes)

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        pass

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        for job, _ in ran:
            self._jobs.move(job, self._jobs.key(job))

    def on_predicted(self, job: Job) -> None:
        pass

    def recalibrate(self) -> None:
        pass

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        return lambda job: (self._jobs.key(job), job.number)

    def on_place_changed(self, job: Job) -> None:
        self._jobs.on_place_changed(job)

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        return self._jobs.part(place).jobs(last_first=last_first)

    def level_sizes(self) -> Sequence[int]:
        return (len(self._jobs),)

    def describe(self) -> str:
        return f"{self.name}: {self.limits.describe()}"
