"""Strict priorities over any policy: a more urgent job comes before all less urgent ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import (
    BatchLimits,
    ChargesTenants,
    Policy,
    Scheduled,
    summed_level_sizes,
)
from fastserve_backend.scheduler.promotion import Promotion
from fastserve_backend.scheduler.walk import Walk


@dataclass(slots=True)
class _PriorityClass:
    """The jobs of one priority."""

    priority: int
    policy: Policy
    num_jobs: int = 0


class PriorityClasses:
    """One policy for each priority of ``Job.service``, walked in order. Lower priorities run first.

    Within a priority the order is that of its policy, and so are the turns of starving jobs. While
    all jobs have the same priority, the decisions are those of its policy alone.

    With strict priorities, less urgent jobs may wait for ever. ``across`` bounds their wait: a job
    of any priority that has not run for ``across.starvation_s`` gets a turn before all priorities.
    Such turns take a quarter of the seats at most, and a tenth of the time until their jobs have a
    token. So none of S starving jobs, whatever their priorities, waits longer than::

        (1 + ceil(S / num_turns)) · starvation_s + 11 · (S + num_turns) · token_s

    with the names of ``Promotion``.

    A policy for a new priority is made when its first job arrives, and dropped with the last job.
    Each operation costs what it costs in the policies; ``walk`` calls those of all priorities.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        across: Promotion | None = None,
        on_recalibrate: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            across: gives turns before all priorities. None: there are none.
            on_recalibrate: called before the policies derive anew what depends on the iteration
                times.
        """
        self._make_policy = make_policy
        self._across = across
        self._on_recalibrate = on_recalibrate
        self._default = _PriorityClass(0, make_policy())
        self._of_priority = {0: self._default}
        # Another thread may read the sizes meanwhile, so this is replaced and never changed.
        self._classes: tuple[_PriorityClass, ...] = (self._default,)  # the most urgent first
        self._num_demotions_before = self._num_promotions_before = 0  # of dropped policies

    @property
    def limits(self) -> BatchLimits:
        """Those of the most urgent priority that has jobs."""
        return next(iter(self._in_use()), self._default).policy.limits

    @property
    def num_demotions(self) -> int:
        now = sum(one.policy.num_demotions for one in self._classes)
        return self._num_demotions_before + now

    @property
    def num_promotions(self) -> int:
        now = sum(one.policy.num_promotions for one in self._classes)
        across = 0 if self._across is None else self._across.num_promotions
        return self._num_promotions_before + now + across

    @property
    def quanta_s(self) -> Sequence[float | None]:
        return self._default.policy.quanta_s

    def has_turn(self, job: Job) -> bool:
        """Whether the job has a turn before its own priority, or before all priorities."""
        return job.outranks_all or self._policy_of(job).has_turn(job)

    def add(self, job: Job, now: float) -> None:
        priority = job.service.priority
        if priority not in self._of_priority:
            self._of_priority[priority] = _PriorityClass(priority, self._make_policy())
            self._sort_classes()
        self._of_priority[priority].num_jobs += 1
        self._policy_of(job).add(job, now)
        if self._across is not None:
            self._across.start_waiting(job, now)

    def remove(self, job: Job) -> None:
        priority_class = self._of_priority[job.service.priority]
        priority_class.policy.remove(job)
        priority_class.num_jobs -= 1
        if priority_class.num_jobs == 0 and priority_class is not self._default:
            self._num_demotions_before += priority_class.policy.num_demotions
            self._num_promotions_before += priority_class.policy.num_promotions
            del self._of_priority[priority_class.priority]
            self._sort_classes()
        if self._across is not None:
            self._across.remove(job)
            job.outranks_all = False

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        if self._across is not None:
            changes = self._across.update(now, in_flight)
            for job in changes.over:
                job.outranks_all = False
            for job in changes.begun:
                job.outranks_all = True
        walks = [one.policy.walk(now, in_flight) for one in self._in_use()]
        turns = self._jobs_that_outrank_all()
        return walks[0] if len(walks) == 1 and not turns else _WalkOfAll(turns, walks)

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        """Those of the most urgent priority that has jobs."""
        most_urgent = next(iter(self._in_use()), self._default)
        return most_urgent.policy.limits_for(now, num_prompts, num_decodes)

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        for policy, sent_here in self._by_policy(batch):
            policy.on_batch_sent(sent_here)

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        if self._across is not None:
            self._across.on_iteration_finished([job for job, _ in ran], now)
        for policy, ran_here in self._by_policy(ran):
            policy.on_iteration_finished(ran_here, now)

    def charge(self, tenant: str, seconds: float) -> None:
        """As of ``ChargesTenants``, whatever the priority: it was no job's time."""
        for one in self._classes:
            if isinstance(one.policy, ChargesTenants):
                one.policy.charge(tenant, seconds)

    def on_predicted(self, job: Job) -> None:
        self._policy_of(job).on_predicted(job)

    def recalibrate(self) -> None:
        self._on_recalibrate()
        for one in self._classes:
            one.policy.recalibrate()

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        """Priority counts before the estimate of the job's own policy."""
        in_use = self._in_use()
        if len(in_use) == 1 and not self._jobs_that_outrank_all():
            return in_use[0].policy.next_run_estimate(now)
        return _EstimateOfAll(in_use, self._across, now)

    def on_place_changed(self, job: Job) -> None:
        self._policy_of(job).on_place_changed(job)

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        in_use = self._in_use()
        if not isinstance(estimate, _EstimateOfAll):
            return in_use[0].policy.by_next_run(place, estimate, last_first=last_first)
        turns = [job for job in self._jobs_that_outrank_all() if job.place is place]
        others = (
            job
            for one in (reversed(in_use) if last_first else in_use)
            for job in one.policy.by_next_run(
                place, estimate.of_priority(one.priority), last_first=last_first
            )
            if not job.outranks_all
        )
        return chain(others, reversed(turns)) if last_first else chain(turns, others)

    def level_sizes(self) -> Sequence[int]:
        others = (one.policy for one in self._classes if one is not self._default)
        return summed_level_sizes([self._default.policy, *others])

    def describe(self) -> str:
        description = self._default.policy.describe()
        if self._across is None:
            return description
        return (
            f"{description}, before all priorities after {self._across.starvation_s * 1e3:.0f} ms"
        )

    def _by_policy(
        self, batch: Sequence[Scheduled]
    ) -> Iterable[tuple[Policy, Sequence[Scheduled]]]:
        """The jobs of each policy."""
        if len(self._classes) == 1:
            return [(self._default.policy, batch)]
        parts: dict[int, list[Scheduled]] = {}
        for one in batch:
            parts.setdefault(one.job.service.priority, []).append(one)
        return [(self._of_priority[key].policy, part) for key, part in parts.items()]

    def _policy_of(self, job: Job) -> Policy:
        return self._of_priority[job.service.priority].policy

    def _in_use(self) -> Sequence[_PriorityClass]:
        """The priorities with jobs, the most urgent first. Priority 0 if there are no jobs."""
        if len(self._classes) == 1:
            return self._classes
        return [one for one in self._classes if one.num_jobs]

    def _sort_classes(self) -> None:
        self._classes = tuple(self._of_priority[key] for key in sorted(self._of_priority))

    def _jobs_that_outrank_all(self) -> Sequence[Job]:
        return () if self._across is None else self._across.jobs_with_turns


class _EstimateOfAll:
    """Estimates of jobs of several priorities. A policy makes its own when one is first needed."""

    def __init__(
        self, classes: Iterable[_PriorityClass], across: Promotion | None, now: float
    ) -> None:
        self._policies = {one.priority: one.policy for one in classes}
        self._across = across
        self._now = now
        self._of_priority: dict[int, NextRunEstimate] = {}

    def of_priority(self, priority: int) -> NextRunEstimate:
        """That of the priority's own policy."""
        estimate = self._of_priority.get(priority)
        if estimate is None:
            estimate = self._policies[priority].next_run_estimate(self._now)
            self._of_priority[priority] = estimate
        return estimate

    def __call__(self, job: Job) -> tuple[float, ...]:
        if self._across is not None and job.outranks_all:
            return -math.inf, self._across.turn_number(job)
        priority = job.service.priority
        return priority, *self.of_priority(priority)(job)


class _WalkOfAll:
    """First the jobs that outrank all, then one priority after the other."""

    def __init__(self, turns: Iterable[Job], walks: Sequence[Walk]) -> None:
        self._turns = iter(turns)
        self._walks = walks
        self._num_walked = 0  # walks that have yielded all their jobs
        self._skipped: set[Place] = set()

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        for job in self._turns:
            if job.place not in self._skipped:
                return job
        while self._num_walked < len(self._walks):
            for job in self._walks[self._num_walked]:
                if not job.outranks_all:
                    return job
            self._num_walked += 1
        raise StopIteration

    def skip(self, place: Place) -> None:
        self._skipped.add(place)
        for walk in self._walks[self._num_walked :]:
            walk.skip(place)
