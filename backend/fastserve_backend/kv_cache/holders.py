"""The jobs that have KV, and how they get it and lose it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.prefixes import Prefixes
from fastserve_backend.kv_cache.round_state import RunningOrder
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters


class Holders:
    """Jobs with KV in either tier. Resets ``num_computed`` of a job that loses its KV."""

    def __init__(self, tiers: TwoTierKV, prefixes: Prefixes, counters: EngineCounters) -> None:
        self._tiers = tiers
        self._prefixes = prefixes
        self._counters = counters
        self._jobs: dict[int, Job] = {}
        self._moved: dict[int, Job] = {}  # whose ``place`` may be out of date
        self._without_step: set[int] = set()  # holders that have computed nothing yet
        self._admitted: dict[int, int] = {}  # strategy defer: job → the most blocks it can need
        self._num_admitted_blocks = 0
        self.numbers = self._jobs.keys()
        """Numbers of all holders. A view, since each iteration looks up thousands of waiting jobs
        in it."""

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, job_number: int) -> Job | None:
        return self._jobs.get(job_number)

    def with_numbers(self, job_numbers: Iterable[int]) -> list[Job]:
        """The holders among the jobs with these numbers."""
        return [self._jobs[number] for number in job_numbers if number in self._jobs]

    @property
    def num_on_device(self) -> int:
        """Jobs that have computed KV which is not only on the host."""
        return len(self._jobs) - self._tiers.num_swapped_out - len(self._without_step)

    def admit(self, job: Job) -> bool:
        """Strategy ``defer``: reserve the most blocks that the job can need, if they are free."""
        device = self._tiers.device
        needed = device.blocks_for(len(job.prompt_ids) + job.params.max_tokens)
        if self._num_admitted_blocks + needed > device.num_blocks:
            return False
        self._admitted[job.number] = needed
        self._num_admitted_blocks += needed
        return True

    def add(self, job: Job) -> None:
        """The job has blocks of its own from now on."""
        self._jobs[job.number] = job
        self._moved[job.number] = job
        if job.num_computed == 0:
            self._without_step.add(job.number)

    def on_sent(self, job: Job) -> None:
        """A step of the job was sent."""
        self._without_step.discard(job.number)

    def on_moved(self, job: Job) -> None:
        """The job's KV leaves for the host, or has come from there."""
        self._moved[job.number] = job

    def update_places(self, order: RunningOrder) -> None:
        """Set ``place`` of all jobs whose KV has moved. Called when a round starts, so that the
        policy's order stays the same during the round."""
        for number, job in self._moved.items():
            place = Place.DEVICE if number in self._jobs else Place.NOWHERE
            if self._tiers.is_swapped_out(number):
                place = Place.HOST
            if job.place is not place:
                job.place = place
                order.placed(job)
        self._moved.clear()

    def drop(self, job: Job) -> None:
        """Free the job's blocks. The job computes its KV again."""
        self._tiers.release(job.number, self._prefixes.keys_to_keep(job))
        self.on_lost(job)

    def on_lost(self, job: Job) -> None:
        """The job's blocks are gone."""
        del self._jobs[job.number]
        self._moved[job.number] = job
        self._without_step.discard(job.number)
        self._prefixes.withdraw(job)
        if job.num_computed:
            job.num_computed = 0
            self._counters.recomputed_jobs += 1

    def release(self, job: Job) -> None:
        """The job, which may have no KV, ended."""
        self._num_admitted_blocks -= self._admitted.pop(job.number, 0)
        self._jobs.pop(job.number, None)
        self._moved.pop(job.number, None)
        self._without_step.discard(job.number)
        self._tiers.release(job.number, self._prefixes.keys_to_keep(job))
        self._prefixes.forget(job)
