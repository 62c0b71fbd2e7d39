"""Fixed priority by input length: the baseline of FastServe §6.3 that knows only prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, Urgency
from fastserve_backend.scheduler.ordered_jobs import OrderedJobs


class FixedPriority:
    """The shortest prompts run first, at every token, whatever their outputs turn out to be.

    Nothing promotes a job: under overload long prompts starve. Selecting costs O(batch), adding and
    removing what ``OrderedJobs`` costs.
    """

    name = "fixed_priority"
    num_demotions = 0
    num_promotions = 0
    quanta_s = (None,)

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._jobs = OrderedJobs()

    def key(self, job: Job) -> float:
        """The job's priority: smaller runs first."""
        return len(job.prompt_ids)

    def add(self, job: Job, now: float) -> None:
        self._jobs.add(job, self.key(job))

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def walk(self, now: float, in_flight: Collection[int]) -> Iterable[Job]:
        return self._jobs

    def iteration_done(self, jobs: Sequence[Job], elapsed_s: float, now: float) -> None:
        pass  # its order knows nothing of how long they have run

    def overran(self, jobs: Sequence[Job], seconds: float, in_flight: Collection[int]) -> None:
        pass

    def predicted(self, job: Job) -> None:
        pass  # its order knows nothing of output lengths

    def recalibrate(self) -> None:
        pass

    def urgency(self, now: float) -> Urgency:
        return lambda job: (self._jobs.key(job), job.number)

    def level_sizes(self) -> Sequence[int]:
        return (len(self._jobs),)

    def describe(self) -> str:
        return f"{self.name}: {self.limits.describe()}"
