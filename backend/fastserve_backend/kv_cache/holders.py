"""The jobs that have KV, and how they come to have none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.prefix_cache import PrefixCache
from fastserve_backend.kv_cache.round import Round, RunningOrder
from fastserve_backend.kv_cache.shared_prefixes import SharedPrefixes
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters


class Holders:
    """Jobs with KV of their own in either tier. Changes ``num_computed`` of those that lose it."""

    def __init__(
        self,
        tiers: TwoTierKV,
        prefix_cache: PrefixCache,
        shared: SharedPrefixes,
        counters: EngineCounters,
    ) -> None:
        self._tiers = tiers
        self._prefix_cache = prefix_cache
        self._shared = shared
        self._counters = counters
        self._jobs: dict[int, Job] = {}
        self._moved: dict[int, Job] = {}  # whose place may be another than when the round began
        self._without_step: set[int] = set()  # of the jobs, those that have computed nothing
        self.numbers = self._jobs.keys()
        """Of them all, a view. Thousands of waiting jobs an iteration may be looked for in it."""

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, job_number: int) -> Job | None:
        return self._jobs.get(job_number)

    def of(self, job_numbers: Iterable[int]) -> list[Job]:
        """Those among the jobs with these numbers."""
        return [self._jobs[number] for number in job_numbers if number in self._jobs]

    def may_leave(self, job: Job, this: Round) -> bool:
        """Whether the job has blocks on the device that no step, no copy and no job offered uses;
        those of the running step count as if it had ended."""
        number = job.number
        if number in this.offered or number in self._shared.copies.sources:
            return False
        if number in this.running:
            return True
        return (
            number not in this.busy
            and not self._tiers.is_read(number)
            and self._tiers.transfer(number) is None
            and self._tiers.device.num_held(number) > 0
        )

    def is_idle(self, job: Job, this: Round) -> bool:
        """Whether the job may leave, and is not in the running step."""
        return job.number not in this.running and self.may_leave(job, this)

    @property
    def num_on_device(self) -> int:
        """Jobs that have computed something that is on the device, or on its way from or to it."""
        return len(self._jobs) - self._tiers.num_swapped_out - len(self._without_step)

    def add(self, job: Job) -> None:
        """What the job has is its own from now on."""
        self._jobs[job.number] = job
        self._moved[job.number] = job
        if job.num_computed == 0:
            self._without_step.add(job.number)

    def computes(self, job: Job) -> None:
        """A step of the job was sent."""
        self._without_step.discard(job.number)

    def moved(self, job: Job) -> None:
        """The job's KV has left for the host, or has come from there."""
        self._moved[job.number] = job

    def place_moved(self, order: RunningOrder) -> None:
        """At the beginning of a round: ``Job.place`` is what it is by now."""
        for number, job in self._moved.items():
            place = Place.DEVICE if number in self._jobs else Place.NOWHERE
            if self._tiers.is_swapped_out(number):
                place = Place.HOST
            if job.place is not place:
                job.place = place
                order.placed(job)
        self._moved.clear()

    def drop(self, job: Job) -> None:
        """The job is to compute its KV again."""
        self._tiers.release(job.number, self._prefix_cache.kept(job))
        self.lost(job)

    def lost(self, job: Job) -> None:
        """The job's blocks are gone."""
        del self._jobs[job.number]
        self._moved[job.number] = job
        self._without_step.discard(job.number)
        self._shared.remove(job)
        if job.num_computed:
            job.num_computed = 0
            self._counters.recomputed_jobs += 1

    def release(self, job: Job) -> None:
        """The job, which may have no KV, ended."""
        self._jobs.pop(job.number, None)
        self._moved.pop(job.number, None)
        self._without_step.discard(job.number)
        self._prefix_cache.forget(job)
        self._shared.remove(job)
        self._tiers.release(job.number, self._prefix_cache.kept(job))
