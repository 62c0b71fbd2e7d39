"""Multi-level feedback queue: the naive baseline, and the base of skip-join MLFQ.

Queues Q1 (level 0) to Qn have the quanta ``base · ratio^level``. A job that has used up its quantum
sinks to a lower queue. So short jobs overtake long ones at every token, although nobody knows which
jobs are short. A job that has waited too long is promoted to Q1 (FastServe §4.1, Algorithm 1) and
has a turn before all others, see ``Promotion``.

A job is charged the time of its own tokens (``own_time_s``). The paper charges it the whole
iteration. With prefill in chunks, a decode would then pay for others' prompts, and sink although it
ran little.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import count
from typing import Self

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Scheduled,
    own_time_s,
    time_to_next_token,
)
from fastserve_backend.scheduler.ordered_jobs import OrderedJobs, SplitOrder
from fastserve_backend.scheduler.policy_context import PolicyContext
from fastserve_backend.scheduler.promotion import Promotion, configured_starvation_s
from fastserve_backend.scheduler.walk import MergedWalk, OrderKey, Walk

# Ticket of the first job with a turn, so that jobs with turns come before all others in Q1.
_FIRST_TICKET = -(2**62)


@dataclass(frozen=True, slots=True)
class Quanta:
    """What the quanta of the queues follow from."""

    base_s: Callable[[], float]
    """Quantum of Q1, > 0: the minimum iteration time, or what the operator set. Called again when
    the iteration times drift."""
    ratio: float
    """Quantum of a queue over that of the queue above; > 1."""
    longest_job_s: float
    """Seconds that the last queue's quantum must cover. They cover the longest prefill, so that
    every job has a queue to join, and the most decodes, because jobs in the last queue run to
    completion."""
    starvation_s: float
    """A job starves if it has not run for so long; if it never ran, since its arrival. The operator
    trades this bound on waiting against mean latency."""

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        config, times, max_model_len = context.config, context.times, context.max_model_len
        base_ms = config.base_quantum_ms
        return cls(
            base_s=lambda: times.decode_s(1) if base_ms == "auto" else base_ms / 1e3,
            ratio=config.quantum_ratio,
            longest_job_s=max(
                times.prefill_s(max_model_len), max_model_len * times.decode_s(max_model_len)
            ),
            starvation_s=configured_starvation_s(config),
        )


@dataclass(slots=True)
class _Entry:
    """What the policy knows about a job, beside its level."""

    num_tokens: int  # the job's tokens when it entered this level
    ticket: int  # ascends along each queue
    used_s: float = 0.0  # time of the job's own tokens at this level


class MLFQ:
    """The naive baseline: every job joins Q1 and sinks one queue at a time. Each queue is FIFO.

    ``walk`` costs O(levels + jobs walked). Each other operation costs what it costs in
    ``SplitOrder``.
    """

    name = "mlfq"

    def __init__(self, limits: BatchLimits, quanta: Quanta, times: IterationTimes) -> None:
        self.limits = limits
        self._quanta = quanta
        self._times = times
        num_queues, quantum_s = 1, quanta.base_s()
        while quantum_s < quanta.longest_job_s:
            quantum_s *= quanta.ratio
            num_queues += 1
        self._queues = [SplitOrder(OrderedJobs) for _ in range(num_queues)]  # keys are tickets
        self._entries: dict[int, _Entry] = {}
        self._promotion = Promotion(quanta.starvation_s, lambda job: time_to_next_token(job, times))
        self._tickets = count()
        self.num_demotions = 0
        self.quanta_s: tuple[float, ...] = ()
        self.recalibrate()

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        return cls(context.limits, Quanta.from_config(context), context.times)

    @property
    def num_promotions(self) -> int:
        return self._promotion.num_promotions

    def has_turn(self, job: Job) -> bool:
        """Whether the job is promoted, so that it comes before all others."""
        return self._promotion.has_turn(job)

    def join_level(self, job: Job) -> int:
        """The queue that a new job enters."""
        return 0

    def demotion_level(self, job: Job) -> int:
        """The queue to which a job sinks when it has used up its quantum."""
        return job.queue_level + 1

    def add(self, job: Job, now: float) -> None:
        assert job.number not in self._entries
        job.queue_level = max(self.join_level(job), self._level_of_age(job.session_s))
        ticket = next(self._tickets)
        self._entries[job.number] = _Entry(job.num_tokens, ticket)
        self._queues[job.queue_level].add(job, ticket)
        self._promotion.start_waiting(job, now)

    def remove(self, job: Job) -> None:
        del self._entries[job.number]
        self._queues[job.queue_level].remove(job)
        self._promotion.remove(job)

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        changes = self._promotion.update(now, in_flight)
        for job in changes.over:
            self._end_turn(job)
        for job in changes.begun:
            self._move(job, self._entries[job.number], 0)
            self._entries[job.number].ticket = _FIRST_TICKET + self._promotion.turn_number(job)
            self._queues[0].move(job, self._entries[job.number].ticket)
        return MergedWalk(lambda place: _by_level(self._queues, place))

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        return self.limits.for_load(num_prompts, num_decodes)

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        pass

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        self._promotion.on_iteration_finished([job for job, _ in ran], now)
        for job, num_tokens in ran:
            entry = self._entries[job.number]
            entry.used_s += own_time_s(job, num_tokens, self._times)
            self._queues[job.queue_level].move(job, entry.ticket)
            if self.has_turn(job):
                continue
            used_up = entry.used_s >= self.quanta_s[job.queue_level]
            # A job never sinks within a prefill in chunks. When KV memory is short, jobs that sink
            # before they have a token could take each other's KV for ever.
            has_token = job.num_tokens > entry.num_tokens
            if used_up and has_token:
                self._demote(job, entry)

    def on_predicted(self, job: Job) -> None:
        pass  # the order does not depend on output lengths

    def recalibrate(self) -> None:
        """Compute the quanta again. Jobs keep their queues; only how long they stay changes."""
        base_s = self._quanta.base_s()
        self.quanta_s = tuple(
            base_s * self._quanta.ratio**level for level in range(len(self._queues))
        )

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        """ENST, the estimated next scheduled time (FastServe §4.2)."""
        execute_s = self.execute_s()
        return lambda job: self.enst(job, execute_s[job.queue_level], now)

    def on_place_changed(self, job: Job) -> None:
        self._queues[job.queue_level].on_place_changed(job)

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        queues = reversed(self._queues) if last_first else self._queues
        jobs = (job for queue in queues for job in queue.part(place).jobs(last_first=last_first))
        early = self._promotion.next_promoted()
        if early is None or early.place is not place:
            return jobs
        # Only this job may run before its place in the queues.
        others = (job for job in jobs if job is not early)
        return merge([early], others, key=estimate, reverse=last_first)

    def execute_s(self) -> list[float]:
        """T_execute of each queue, in seconds: until all jobs above have sunk to this queue.

        Each job above runs the quanta of its own queue and of all queues between, and the jobs of a
        batch run at the same time. So all jobs of a queue have the same T_execute.
        """
        execute_s = []
        jobs_above, total_s = 0, 0.0
        for queue, quantum_s in zip(self._queues, self.quanta_s, strict=True):
            execute_s.append(total_s / self.limits.max_seqs)
            jobs_above += len(queue)
            total_s += jobs_above * quantum_s
        return execute_s

    def enst(self, job: Job, execute_s: float, now: float) -> tuple[float, float]:
        """``min(T_promote, T_execute)`` in seconds, then the job's ticket.

        T_promote is the time until the job's turn. It counts only for the job that is promoted
        next.
        """
        turn_in_s = self._promotion.turn_due_in_s(job, now)
        if turn_in_s is not None:
            execute_s = min(execute_s, turn_in_s)
        return execute_s, self._entries[job.number].ticket

    def level_sizes(self) -> Sequence[int]:
        return [len(queue) for queue in self._queues]

    def describe(self) -> str:
        return (
            f"{self.name}: {len(self.quanta_s)} queues, quanta {self.quanta_s[0] * 1e3:.2f} to "
            f"{self.quanta_s[-1] * 1e3:.0f} ms (ratio {self._quanta.ratio:g}), promotion after "
            f"{self._quanta.starvation_s * 1e3:.0f} ms, {self.limits.describe()}"
        )

    def _level_of_age(self, session_s: float) -> int:
        """The queue to which a job has sunk that has run for ``session_s`` since it was in Q1. So
        attained service is that of the whole session (PLAS; Autellix, arXiv 2502.13965)."""
        level = 0
        while level < len(self.quanta_s) - 1 and session_s >= self.quanta_s[level]:
            session_s -= self.quanta_s[level]
            level += 1
        return level

    def _end_turn(self, job: Job) -> None:
        entry = self._entries[job.number]
        if entry.used_s >= self.quanta_s[0] and len(self._queues) > 1:
            self._demote(job, entry)
        else:
            self._move(job, entry, 0)

    def _demote(self, job: Job, entry: _Entry) -> None:
        if job.queue_level == len(self._queues) - 1:
            entry.used_s = 0.0  # there is no lower queue: it keeps its place
            return
        self._move(job, entry, self.demotion_level(job))
        self.num_demotions += 1

    def _move(self, job: Job, entry: _Entry, level: int) -> None:
        self._queues[job.queue_level].remove(job)
        job.queue_level = level
        entry.num_tokens = job.num_tokens
        entry.ticket = next(self._tickets)
        self._queues[level].add(job, entry.ticket)
        entry.used_s = 0.0


def _by_level(
    queues: Sequence[SplitOrder[OrderedJobs]], place: Place
) -> Iterator[tuple[OrderKey, Job]]:
    for level, queue in enumerate(queues):
        if len(queue):
            for (ticket, _), job in queue.part(place).items():
                yield (level, ticket), job
