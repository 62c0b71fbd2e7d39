"""The Gittins policy: nobody knows how long a job is, but how long jobs are is learned.

MLFQ takes it for granted that a job which ran long will run for long still. How true that is, the
jobs that ended say: see ``GittinsIndex`` for the order, and ``LengthDistribution`` for what is
learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_backend.config import Objective
from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import (
    UNLIMITED,
    BatchLimits,
    IterationTimes,
    Memory,
    Scheduled,
    time_to_next_token,
)
from fastserve_backend.scheduler.fixed_priority import FixedPriority
from fastserve_backend.scheduler.gittins_index import GittinsIndex
from fastserve_backend.scheduler.length_distribution import LengthDistribution
from fastserve_backend.scheduler.waiting_jobs import WaitingJobs

# The index is computed anew, and all jobs are put in order by it, when this share of what was
# learned is new; however much was learned, when so many jobs have ended.
_NEWS = 0.1
_MOST_NEWS = 200
# Below every other key, which are indices between 0 and 1 with a minus; those promoted first come
# first.
_PROMOTED = -1e12


@dataclass(slots=True)
class _Entry:
    """What the policy knows of a job beside its key."""

    bin: int = 0  # of its length, if it ended now
    promoted: float | None = None  # its key, while it is
    young_at: int = 0  # tokens that it had when it was promoted last


class Gittins(FixedPriority):
    """The job of the largest index runs first, at every token; of equal ones the first to arrive.

    A job that has waited for ``starvation_s`` comes before all others until it has a token, and
    counts as young again from then on, as one that MLFQ has promoted: with a single token it would
    only have been swapped in and out.
    """

    name = "gittins"

    def __init__(
        self,
        limits: BatchLimits,
        times: IterationTimes,
        *,
        max_model_len: int,
        objective: Objective,
        starvation_s: float,
    ) -> None:
        super().__init__(limits)
        self._times = times
        self._objective: Objective = objective
        self._lengths = LengthDistribution(max_model_len)
        self._index = GittinsIndex(self._lengths, objective)
        self._ended_of_index = 0
        self._entries: dict[int, _Entry] = {}
        self._waiting = WaitingJobs(starvation_s)
        self.num_promotions = 0

    @property
    def num_learned(self) -> int:
        """Jobs whose whole length is known."""
        return self._lengths.num_ended

    def key(self, job: Job) -> float:
        promoted = self._entries[job.number].promoted
        if promoted is not None:
            return promoted
        decode_s = self._times.decode_s(job.num_tokens)
        # A prefill makes the iteration longer for all that are in it, a decode hardly.
        extra_s = self._limits.max_seqs * (time_to_next_token(job, self._times) - decode_s)
        age = len(job.output_ids) - self._entries[job.number].young_at
        return -self._index.of(extra_s / decode_s, age, self._most_tokens(job))

    def add(self, job: Job, now: float) -> None:
        self._entries[job.number] = _Entry()
        super().add(job, now)
        self._waiting.begin(job, now)

    def remove(self, job: Job) -> None:
        super().remove(job)
        self._waiting.remove(job)
        entry = self._entries.pop(job.number)
        if job.output_ids:
            self._pass(entry, job)
            if job.ended_by_itself:
                self._lengths.ended(entry.bin)
                self._learn()

    def select(self, now: float, memory: Memory = UNLIMITED) -> list[Scheduled]:
        for job in self._waiting.take_starved(now):
            if job.number not in self._in_flight:
                self._entries[job.number].promoted = _PROMOTED + self.num_promotions
                self._entries[job.number].young_at = len(job.output_ids)
                self._jobs.move(job, self.key(job))
                self.num_promotions += 1
        return super().select(now, memory)

    def iteration_done(self, jobs: Sequence[Job], elapsed_s: float, now: float) -> None:
        super().iteration_done(jobs, elapsed_s, now)
        for job in jobs:
            self._waiting.begin(job, now)
            if job.num_uncomputed == 1:
                entry = self._entries[job.number]
                entry.promoted = None
                self._pass(entry, job)
            self._jobs.move(job, self.key(job))

    def recalibrate(self) -> None:
        self._jobs.reorder(self.key)

    def describe(self) -> str:
        return (
            f"{self.name}: objective {self._objective}, promotion after "
            f"{self._waiting.starvation_s * 1e3:.0f} ms, {self._limits.describe()}"
        )

    def _most_tokens(self, job: Job) -> int:
        """Jobs whose length is forced stand for jobs whose length nobody knows: with them
        ``max_tokens`` would be more than a bound."""
        return self._lengths.edges[-1] if job.params.ignore_eos else job.params.max_tokens

    def _pass(self, entry: _Entry, job: Job) -> None:
        """The job's length is at least what it has now."""
        reached = self._lengths.bin_of(len(job.output_ids))
        self._lengths.passed(entry.bin, reached)
        entry.bin = reached

    def _learn(self) -> None:
        news = self.num_learned - self._ended_of_index
        if news > min(_NEWS * self.num_learned, _MOST_NEWS):
            self._ended_of_index = self.num_learned
            self._index = GittinsIndex(self._lengths, self._objective)
            self.recalibrate()
