"""First come, first served, run to completion with iteration-level batching (ORCA's policy)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import (
    UNLIMITED,
    BatchLimits,
    Memory,
    Scheduled,
    Urgency,
    fill_batch,
)


class FCFS:
    """Jobs run in order of arrival; a running job is never preempted for a later one."""

    num_demotions = 0
    num_promotions = 0
    quanta_s = (None,)

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._jobs: OrderedDict[int, Job] = OrderedDict()  # in order of arrival
        self._in_flight: set[int] = set()

    def add(self, job: Job, now: float) -> None:
        if job.number in self._jobs:
            raise ValueError(f"job {job.number} is already queued")
        self._jobs[job.number] = job

    def remove(self, job: Job) -> None:
        del self._jobs[job.number]
        self._in_flight.discard(job.number)

    def select(self, now: float, memory: Memory = UNLIMITED) -> list[Scheduled]:
        in_flight = self._in_flight
        batch = fill_batch(
            self._jobs.values(), self._limits, lambda job: job.number in in_flight, memory
        )
        in_flight.update(job.number for job, _ in batch)
        return batch

    def iteration_done(self, jobs: Sequence[Job], elapsed_s: float, now: float) -> None:
        self.not_run(jobs)

    def not_run(self, jobs: Sequence[Job]) -> None:
        self._in_flight.difference_update(job.number for job in jobs)

    def predicted(self, job: Job) -> None:
        pass  # its order knows nothing of output lengths

    def recalibrate(self) -> None:
        pass

    def urgency(self, now: float) -> Urgency:
        return lambda job: (job.number, 0.0)

    def level_sizes(self) -> Sequence[int]:
        return (len(self._jobs),)

    def describe(self) -> str:
        return f"fcfs: {self._limits.describe()}"
