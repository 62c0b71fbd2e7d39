"""Skip-join multi-level feedback queue (FastServe §4.1, Algorithm 1).

The output length of a job is unknown, but its input length is known and fixes the time of its first
iteration. A job therefore joins the highest queue whose quantum covers its prefill, skipping those
above, and sinks as it uses up quanta: short jobs overtake long ones at every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, IterationTimes, fill_batch


@dataclass(slots=True)
class _Entry:
    """What the policy knows of a job beside its level."""

    used_s: float = 0.0  # execution time at this level
    in_flight: bool = False


class SkipJoinMLFQ:
    """Queues Q1 (level 0) to Qn with quanta ``base · ratio^level``; FIFO inside a queue.

    Args:
        base_quantum_s: quantum of Q1; the minimum iteration time.
        quantum_ratio: quantum of a queue over that of the queue above, > 1.
        starvation_s: a job that has not run for this long (since its arrival, if it never ran) is
            promoted to Q1: the bound on waiting that the operator trades for mean latency.
        longest_prefill_s: the last queue's quantum covers it, so every job has a queue to join.

    Every operation costs O(1) amortised, except ``select``: O(jobs of the batch + levels).
    """

    def __init__(
        self,
        limits: BatchLimits,
        times: IterationTimes,
        *,
        base_quantum_s: float,
        quantum_ratio: float,
        starvation_s: float,
        longest_prefill_s: float,
    ) -> None:
        if base_quantum_s <= 0 or quantum_ratio <= 1 or starvation_s <= 0:
            raise ValueError("need base_quantum_s > 0, quantum_ratio > 1 and starvation_s > 0")
        self._limits = limits
        self._times = times
        self._starvation_s = starvation_s
        quanta = [base_quantum_s]
        while quanta[-1] < longest_prefill_s:
            quanta.append(quanta[-1] * quantum_ratio)
        self.quanta_s: tuple[float, ...] = tuple(quanta)
        # A dict is a FIFO with O(1) removal from anywhere.
        self._queues: list[dict[int, Job]] = [{} for _ in quanta]
        self._entries: dict[int, _Entry] = {}
        # Jobs not yet promoted → since when they wait. A job is re-appended when it ran, so the
        # first entry has waited longest, but for arrivals during an iteration: those stand behind
        # the jobs that ran in it, and are promoted at most that iteration late.
        self._waiting_since: dict[int, tuple[float, Job]] = {}
        self.num_demotions = 0
        self.num_promotions = 0

    def add(self, job: Job, now: float) -> None:
        if job.number in self._entries:
            raise ValueError(f"job {job.number} is already queued")
        job.queue_level = self._level_for(self._next_iteration_s(job), highest=0)
        self._entries[job.number] = _Entry()
        self._queues[job.queue_level][job.number] = job
        self._waiting_since[job.number] = (now, job)

    def remove(self, job: Job) -> None:
        del self._entries[job.number]
        del self._queues[job.queue_level][job.number]
        self._waiting_since.pop(job.number, None)

    def select(self, now: float) -> list[Job]:
        self._promote_starved(now)
        entries = self._entries
        batch = fill_batch(
            chain.from_iterable(queue.values() for queue in self._queues),
            self._limits,
            lambda job: entries[job.number].in_flight,
        )
        for job in batch:
            entries[job.number].in_flight = True
        return batch

    def iteration_done(self, jobs: Sequence[Job], elapsed_s: float, now: float) -> None:
        for job in jobs:
            entry = self._entries[job.number]
            entry.in_flight = False
            entry.used_s += elapsed_s
            if entry.used_s >= self.quanta_s[job.queue_level]:
                self._demote(job, entry)
            self._waiting_since.pop(job.number, None)
            self._waiting_since[job.number] = (now, job)

    def not_run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._entries[job.number].in_flight = False

    def by_lowest_priority(self) -> Iterator[Job]:
        for queue in reversed(self._queues):
            yield from reversed(queue.values())

    def level_sizes(self) -> Sequence[int]:
        return [len(queue) for queue in self._queues]

    def describe(self) -> str:
        return (
            f"skip_join_mlfq: {len(self.quanta_s)} queues, quanta {self.quanta_s[0] * 1e3:.2f} to "
            f"{self.quanta_s[-1] * 1e3:.0f} ms, promotion after {self._starvation_s * 1e3:.0f} ms"
        )

    def _promote_starved(self, now: float) -> None:
        while self._waiting_since:
            number, (since, job) = next(iter(self._waiting_since.items()))
            if now - since < self._starvation_s:
                return
            # Off the list until it has run: it keeps its turn in Q1 and is not promoted twice.
            del self._waiting_since[number]
            entry = self._entries[number]
            if job.queue_level > 0 and not entry.in_flight:
                self._move(job, entry, 0)
                self.num_promotions += 1

    def _demote(self, job: Job, entry: _Entry) -> None:
        last = len(self._queues) - 1
        if job.queue_level == last:
            entry.used_s = 0.0  # nothing below: it keeps its place, FIFO
            return
        below = job.queue_level + 1
        self._move(job, entry, self._level_for(self._next_iteration_s(job), highest=below))
        self.num_demotions += 1

    def _move(self, job: Job, entry: _Entry, level: int) -> None:
        del self._queues[job.queue_level][job.number]
        job.queue_level = level
        self._queues[level][job.number] = job
        entry.used_s = 0.0

    def _next_iteration_s(self, job: Job) -> float:
        if job.num_uncomputed == 1:
            return self._times.decode_s(job.num_tokens)
        return self._times.prefill_s(job.num_uncomputed)

    def _level_for(self, iteration_s: float, highest: int) -> int:
        """The highest queue, from ``highest`` down, whose quantum covers the iteration."""
        for level in range(highest, len(self.quanta_s)):
            if self.quanta_s[level] >= iteration_s:
                return level
        return len(self.quanta_s) - 1
