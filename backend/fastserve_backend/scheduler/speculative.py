"""Speculative scheduling: shortest predicted remaining time first (ALISE, arXiv 2410.23537, §2).

A predictor estimates output lengths from prompts. A prediction may come at any time, or never. Jobs
without one are in the queues of skip-join MLFQ, and both kinds are merged into one order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Self

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Scheduled,
    is_owed_first_token,
    time_to_next_token,
)
from fastserve_backend.scheduler.mlfq import Quanta
from fastserve_backend.scheduler.ordered_jobs import SplitOrder, WeighedJobs
from fastserve_backend.scheduler.policy_context import PolicyContext
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from fastserve_backend.scheduler.walk import MergedWalk, Walk

# A second since a job's arrival counts as so many seconds less of remaining time. Under overload,
# 0.03 makes the tail 5% worse, and 0.3 the mean a quarter to a third (docs/speculative.md).
_AGING = 0.1


@dataclass(slots=True)
class _Entry:
    """What the policy knows about a job, beside its order."""

    arrived_s: float
    num_tokens: int | None = None  # output tokens that are predicted now; None: no prediction
    remaining_s: float = 0.0  # with a prediction


class Speculative:
    """At every token, the job with the least virtual remaining time runs first.

    That is its predicted remaining time, less ``aging`` times the seconds since its arrival. All
    jobs age at the same rate, so the order of two jobs changes only when one of them runs, and the
    key is ``remaining + aging · arrival``. **No job starves**: a job that arrives more than
    ``remaining / aging`` seconds after another never comes before it.

    A job that outlives its prediction is demoted: the prediction is doubled. Jobs without a
    prediction are in the queues of skip-join MLFQ. The first of them is compared with jobs that
    have a prediction as if its queue's quantum were its remaining time. If no job has a prediction,
    the schedule is that of skip-join MLFQ.

    **First tokens**: a prediction never delays a cheap first token, see ``is_owed_first_token``.
    Such a job has the place that it would have without a prediction.

    ``job.queue_level`` of a job with a prediction is the queue whose quantum covers its remaining
    time, and ``level_sizes`` counts it there.

    ``walk`` costs what it costs in MLFQ. ``next_run_estimate`` adds one number for each job, in
    2 ns. Everything else costs what it costs in ``OrderedJobs``.
    """

    name = "speculative"

    def __init__(
        self, limits: BatchLimits, quanta: Quanta, times: IterationTimes, aging: float
    ) -> None:
        self.limits = limits
        self._times = times
        self._aging = aging
        self._entries: dict[int, _Entry] = {}
        self._queues = SkipJoinMLFQ(limits, quanta, times)  # jobs without a prediction
        self._order = SplitOrder(lambda: WeighedJobs(self._remaining_of))  # jobs with one
        self._ordered_sizes = [0] * len(self._queues.quanta_s)  # by queue level
        self._num_outlived = 0

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        return cls(context.limits, Quanta.from_config(context), context.times, _AGING)

    @property
    def num_demotions(self) -> int:
        return self._queues.num_demotions + self._num_outlived

    @property
    def num_promotions(self) -> int:
        return self._queues.num_promotions

    @property
    def quanta_s(self) -> Sequence[float]:
        return self._queues.quanta_s

    def has_turn(self, job: Job) -> bool:
        return self._queues.has_turn(job)

    def add(self, job: Job, now: float) -> None:
        self._entries[job.number] = _Entry(now)
        self._queues.add(job, now)
        if job.predicted_tokens is not None:
            self.on_predicted(job)

    def remove(self, job: Job) -> None:
        if self._entries[job.number].num_tokens is None:
            self._queues.remove(job)
        else:
            self._order.remove(job)
            self._ordered_sizes[job.queue_level] -= 1
        del self._entries[job.number]

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        return _BothOrders(
            self._queues.walk(now, in_flight),
            MergedWalk(lambda place: self._order.part(place).items()),
            self._queued_first,
        )

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        return self.limits.for_load(num_prompts, num_decodes)

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        pass

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        queued = []
        for one in ran:
            entry = self._entries[one.job.number]
            if entry.num_tokens is None:
                queued.append(one)
            else:
                self._num_outlived += one.job.num_outputs > entry.num_tokens
                self._order.move(one.job, self._expect_tokens(one.job, entry.num_tokens))
        self._queues.on_iteration_finished(queued, now)

    def on_predicted(self, job: Job) -> None:
        assert job.predicted_tokens is not None
        entry = self._entries[job.number]
        if entry.num_tokens is None:
            self._queues.remove(job)
            self._order.add(job, 0.0)
            self._ordered_sizes[job.queue_level] += 1
        self._order.move(job, self._expect_tokens(job, job.predicted_tokens))

    def recalibrate(self) -> None:
        self._queues.recalibrate()
        self._order.reorder(self._recomputed_key)

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        """EWT, the estimated wait time (ALISE), in seconds; then the order of selection.

        ``min(T_execute, T_promote)``. T_execute: the jobs before it run their remaining times, and
        the jobs of a batch run at the same time. T_promote: its age makes up for its own remaining
        time, so that no arrival can come before it.

        For a job without a prediction, both are those of ENST, see ``MLFQ``. Its T_execute also
        counts the jobs with a prediction that come before it.
        """
        execute_s = self._queues.execute_s()
        parts = [self._order.part(place) for place in Place]
        sums_s = [part.sums() for part in parts]

        def ordered_before_s(key: float, number: int) -> float:
            before_s = (
                float(of_part[part.num_before(key, number)])
                for part, of_part in zip(parts, sums_s, strict=True)
            )
            return sum(before_s) / self.limits.max_seqs

        def ewt(job: Job) -> tuple[float, float]:
            if self._entries[job.number].num_tokens is None:
                key = self._queued_key(job)
                before_s = 0.0 if self._queues.has_turn(job) else ordered_before_s(key, job.number)
                return self._queues.enst(job, execute_s[job.queue_level] + before_s, now)
            key = self._order.key(job)
            virtual_s = key - self._aging * now
            before_s = ordered_before_s(key, job.number) + execute_s[self._level_of(virtual_s)]
            return min(before_s, max(0.0, virtual_s / self._aging)), key

        return ewt

    def on_place_changed(self, job: Job) -> None:
        if job in self._order:
            self._order.on_place_changed(job)
        else:
            self._queues.on_place_changed(job)

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        """Jobs of one queue keep the order of the queue, whatever their estimates are."""
        return merge(
            self._queues.by_next_run(place, estimate, last_first=last_first),
            self._order.part(place).jobs(last_first=last_first),
            key=estimate,
            reverse=last_first,
        )

    def level_sizes(self) -> Sequence[int]:
        sizes = zip(self._queues.level_sizes(), self._ordered_sizes, strict=True)
        return [queued + ordered for queued, ordered in sizes]

    def describe(self) -> str:
        return (
            f"{self.name}: aging {self._aging:g} s a second; without a prediction "
            f"{self._queues.describe()}"
        )

    def _queued_first(self, queued: Job, ordered: Job) -> bool:
        """Whether a job in a queue comes before a job with a prediction."""
        if self._queues.has_turn(queued):
            return True
        return self._queued_key(queued) < self._order.key(ordered)

    def _queued_key(self, job: Job) -> float:
        """The key by which a job in a queue is compared with jobs that have a prediction."""
        quantum_s = self._queues.quanta_s[job.queue_level]
        return quantum_s + self._aging * self._entries[job.number].arrived_s

    def _level_of(self, remaining_s: float) -> int:
        """The highest queue whose quantum covers ``remaining_s``, else the last one."""
        quanta_s = self._queues.quanta_s
        return min(bisect_left(quanta_s, remaining_s), len(quanta_s) - 1)

    def _remaining_of(self, job: Job) -> float:
        return self._entries[job.number].remaining_s

    def _recomputed_key(self, job: Job) -> float:
        num_tokens = self._entries[job.number].num_tokens
        assert num_tokens is not None
        return self._expect_tokens(job, num_tokens)

    def _expect_tokens(self, job: Job, num_tokens: int) -> float:
        """Predict that the job ends with ``num_tokens`` output tokens, and return its new key. The
        prediction is doubled while the job already has more tokens."""
        entry = self._entries[job.number]
        num_tokens = max(1, num_tokens)
        while num_tokens < job.num_outputs:
            num_tokens *= 2
        if not job.params.ignore_eos:  # a forced length: the policy must not use max_tokens
            num_tokens = min(num_tokens, job.params.max_tokens)
        entry.num_tokens = num_tokens
        entry.remaining_s = self._remaining_s(job, num_tokens)
        self._ordered_sizes[job.queue_level] -= 1
        job.queue_level = self._level_of(entry.remaining_s)
        self._ordered_sizes[job.queue_level] += 1
        remaining_s = entry.remaining_s
        if is_owed_first_token(job, self._times):
            remaining_s = min(remaining_s, self.quanta_s[self._queues.join_level(job)])
        return remaining_s + self._aging * entry.arrived_s

    def _remaining_s(self, job: Job, num_tokens: int) -> float:
        """ALISE's T_pre + T_dec: the rest of the prefill, and all decodes after it, each as long as
        the middle one."""
        num_decodes = max(0, num_tokens - job.num_outputs - 1)
        decode_s = self._times.decode_s(job.num_tokens + 1 + num_decodes // 2)
        return time_to_next_token(job, self._times) + num_decodes * decode_s


class _BothOrders:
    """Merges jobs in queues with jobs that have a prediction: compares the next of each."""

    def __init__(
        self, queued: Walk, ordered: Walk, queued_first: Callable[[Job, Job], bool]
    ) -> None:
        self._queued, self._ordered = queued, ordered
        self._queued_first = queued_first
        self._next_queued = next(queued, None)
        self._next_ordered = next(ordered, None)

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        queued, ordered = self._next_queued, self._next_ordered
        if ordered is None or (queued is not None and self._queued_first(queued, ordered)):
            if queued is None:
                raise StopIteration
            self._next_queued = next(self._queued, None)
            return queued
        self._next_ordered = next(self._ordered, None)
        return ordered

    def skip(self, place: Place) -> None:
        self._queued.skip(place)
        self._ordered.skip(place)
        if self._next_queued is not None and self._next_queued.place is place:
            self._next_queued = next(self._queued, None)
        if self._next_ordered is not None and self._next_ordered.place is place:
            self._next_ordered = next(self._ordered, None)
