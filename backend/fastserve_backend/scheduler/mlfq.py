"""Multi-level feedback queue: what the naive baseline and skip-join MLFQ have in common.

Queues Q1 (level 0) to Qn with quanta ``base · ratio^level``. A job sinks as it uses up quanta, so
that short jobs overtake long ones at every token although nobody knows which are short. A job that
has waited too long is promoted to Q1 (FastServe §4.1, Algorithm 1), where it has its turn before
all others, see ``Promotion``.

A job uses up its quantum by the time that its own tokens take (``own_time_s``). The paper charges
it for the whole iteration. With prefill in chunks a decode would then pay for others' prompts, and
sink although it ran little.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import count
from typing import Self

from fastserve_backend.job import Job, Place
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Scheduled,
    Urgency,
    own_time_s,
    time_to_next_token,
)
from fastserve_backend.scheduler.ordered_jobs import OrderedJobs, SplitOrder
from fastserve_backend.scheduler.policy_context import PolicyContext
from fastserve_backend.scheduler.promotion import Promotion, configured_starvation_s
from fastserve_backend.scheduler.walk import MergedWalk, OrderKey, Walk

# Jobs with a turn stand before all others in Q1.
_FIRST_TICKET = -(2**62)


@dataclass(frozen=True, slots=True)
class Quanta:
    """How quanta are set."""

    base_s: Callable[[], float]
    """Quantum of Q1, > 0: the minimum iteration time, or what the operator set. Asked again when
    the iteration times drift."""
    ratio: float
    """Quantum of a queue over that of the queue above; > 1."""
    longest_job_s: float
    """The last queue's quantum covers it: the longest prefill, so that every job has a queue to
    join, and all the decodes after it, because jobs in the last queue run to completion."""
    starvation_s: float
    """A job that has not run for this long (since its arrival, if it never ran) starves: the bound
    on waiting that the operator trades for mean latency."""

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
    """What the policy knows of a job beside its level."""

    num_tokens: int  # of the job when it entered this level
    ticket: int  # ascends along each queue
    used_s: float = 0.0  # time of the job's own tokens at this level


class MLFQ:
    """The naive baseline: every job joins Q1 and is demoted one queue at a time. FIFO in a queue.

    Every operation costs what it costs in ``SplitOrder``; ``walk`` O(levels + jobs walked).
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
        self._queues = [SplitOrder(OrderedJobs) for _ in range(num_queues)]  # by tickets
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
        """Whether the job is promoted, and so comes before all others."""
        return self._promotion.has_turn(job)

    def join_level(self, job: Job) -> int:
        """The queue that a new job enters."""
        return 0

    def demotion_level(self, job: Job) -> int:
        """The queue below its own that a job sinks to when it has used its quantum."""
        return job.queue_level + 1

    def add(self, job: Job, now: float) -> None:
        assert job.number not in self._entries
        job.queue_level = self.join_level(job)
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
        return MergedWalk(
            lambda place: _by_level([queue.part(place).items() for queue in self._queues])
        )

    def iteration_done(self, ran: Sequence[Scheduled], now: float) -> None:
        self._promotion.iteration_done([job for job, _ in ran], now)
        for job, num_tokens in ran:
            entry = self._entries[job.number]
            entry.used_s += own_time_s(job, num_tokens, self._times)
            self._queues[job.queue_level].move(job, entry.ticket)
            if self.has_turn(job):
                continue
            used_up = entry.used_s >= self.quanta_s[job.queue_level]
            # Never within a prefill in chunks: when KV memory is short, jobs that sink before they
            # have a token could take each other's KV for ever.
            has_token = job.num_tokens > entry.num_tokens
            if used_up and has_token:
                self._demote(job, entry)

    def predicted(self, job: Job) -> None:
        pass  # its order knows nothing of output lengths

    def recalibrate(self) -> None:
        """Jobs keep their queues; only how long they may stay there changes."""
        base_s = self._quanta.base_s()
        self.quanta_s = tuple(
            base_s * self._quanta.ratio**level for level in range(len(self._queues))
        )

    def urgency(self, now: float) -> Urgency:
        """ENST, the estimated next scheduled time (FastServe §4.2)."""
        execute_s = self.execute_s()
        return lambda job: self.enst(job, execute_s[job.queue_level], now)

    def placed(self, job: Job) -> None:
        self._queues[job.queue_level].placed(job)

    def by_urgency(self, place: Place, urgency: Urgency, *, last_first: bool) -> Iterator[Job]:
        queues = reversed(self._queues) if last_first else self._queues
        jobs = (job for queue in queues for job in queue.part(place).jobs(last_first=last_first))
        early = self._promotion.next_promoted()
        if early is None or early.place is not place:
            return jobs
        # It alone may run before its place in the queues.
        others = (job for job in jobs if job is not early)
        return merge([early], others, key=urgency, reverse=last_first)

    def execute_s(self) -> list[float]:
        """T_execute of a job in each queue: seconds until all above it have sunk to its queue.

        A job j in a queue above runs the quanta of the queues from its own down to, not including,
        the job's; shared among the jobs of a batch. So T_execute depends on the queue alone.
        """
        execute_s = []
        jobs_above, total_s = 0, 0.0
        for queue, quantum_s in zip(self._queues, self.quanta_s, strict=True):
            execute_s.append(total_s / self.limits.max_seqs)
            jobs_above += len(queue)
            total_s += jobs_above * quantum_s
        return execute_s

    def enst(self, job: Job, execute_s: float, now: float) -> tuple[float, float]:
        """``min(T_promote, T_execute)``, seconds: until the job's turn, if it is the next to be
        promoted, or until those before it have run; then FIFO in a queue."""
        turn_in_s = self._promotion.turn_in(job, now)
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

    def _end_turn(self, job: Job) -> None:
        entry = self._entries[job.number]
        if entry.used_s >= self.quanta_s[0] and len(self._queues) > 1:
            self._demote(job, entry)
        else:
            self._move(job, entry, 0)

    def _demote(self, job: Job, entry: _Entry) -> None:
        if job.queue_level == len(self._queues) - 1:
            entry.used_s = 0.0  # nothing below: it keeps its place, FIFO
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
    queues: Sequence[Iterable[tuple[OrderKey, Job]]],
) -> Iterator[tuple[OrderKey, Job]]:
    for level, queue in enumerate(queues):
        for (ticket, _), job in queue:
            yield (level, ticket), job
