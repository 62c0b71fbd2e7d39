"""The Gittins policy: no job's length is known, but the distribution of lengths is learned.

MLFQ assumes that a job which has run long will run for a long time yet. This policy learns from the
jobs that end how true that is. ``GittinsIndex`` gives the order, ``LengthDistribution`` is what is
learned. Where lengths are predicted, the policy learns how good predictions are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Scheduled,
    is_owed_first_token,
    time_to_next_token,
)
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy
from fastserve_backend.scheduler.learned_lengths import IndexedLengths, LearnedLengths
from fastserve_backend.scheduler.policy_context import PolicyContext
from fastserve_backend.scheduler.promotion import Promotion, configured_starvation_s
from fastserve_backend.scheduler.walk import Walk

# A selection sorts this many jobs by a new index. With 10,000 jobs, sorting all at once would
# delay a step by tens of milliseconds.
_SORTED_AT_ONCE = 8
# Key of the first job with a turn; later turns follow. All other keys are far larger: they are
# negative indices, down to some negative hundreds.
_FIRST_TURN_KEY = -1e12


@dataclass(slots=True)
class _Entry:
    """What the policy knows of a job beside its key."""

    job: Job
    learned: tuple[IndexedLengths, ...]  # learn from the job; the last one gives its order
    bin: int = 0  # of the job's length, if it ended now
    key_holds_to: int = -1  # while the job decodes, its key is valid up to so many output tokens


class Gittins(KeyedPolicy):
    """At every token, the job with the largest index runs first; of equal ones, the oldest.

    Starving jobs come before all others, see ``Promotion``. A prediction never delays a cheap first
    token, see ``is_owed_first_token``.
    """

    name = "gittins"

    def __init__(
        self,
        limits: BatchLimits,
        times: IterationTimes,
        learned: LearnedLengths,
        *,
        max_model_len: int,
        starvation_s: float,
    ) -> None:
        """
        Args:
            learned: may be shared with other policies, which then learn from each other's jobs.
        """
        super().__init__(limits)
        self._times = times
        self._learned = learned
        self._max_model_len = max_model_len
        self._num_updates = learned.num_updates  # of the indices by which the jobs are sorted
        self._num_to_sort = 0  # so many of the first entries have keys of an old index
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._promotion = Promotion(starvation_s, lambda job: time_to_next_token(job, times))

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        return cls(
            context.limits,
            context.times,
            context.learned,
            max_model_len=context.max_model_len,
            starvation_s=configured_starvation_s(context.config),
        )

    @property
    def num_promotions(self) -> int:
        return self._promotion.num_promotions

    @property
    def num_learned(self) -> int:
        """Jobs whose full length is known."""
        return self._learned.num_ended

    def has_turn(self, job: Job) -> bool:
        return self._promotion.has_turn(job)

    def key(self, job: Job) -> float:
        if self._promotion.has_turn(job):
            return _FIRST_TURN_KEY + self._promotion.turn_number(job)
        extra = 0.0
        if job.num_uncomputed > 1:
            # A prefill makes the iteration of all jobs longer; a decode hardly does.
            prefill_s = self._times.prefill_s(job.num_uncomputed)
            decode_s = self._times.decode_s(job.num_tokens)
            extra = max(0.0, prefill_s - decode_s) / decode_s
        learned = self._entries[job.number].learned
        # Only the last of these depends on the prediction.
        which = learned if is_owed_first_token(job, self._times) else learned[-1:]
        prompt, most = len(job.prompt_ids), self._most_tokens(job)
        age = self._age(job, job.num_outputs)
        return -max(one.index.of(extra, prompt, age, most) for one in which)

    def add(self, job: Job, now: float) -> None:
        entry = self._entries[job.number] = _Entry(job, self._learned.of_job(job))
        if job.session_tokens:
            entry.bin = self._learned.of_all.lengths.bin_of(self._age(job, 0))
        super().add(job, now)
        self._promotion.start_waiting(job, now)

    def remove(self, job: Job) -> None:
        super().remove(job)
        self._promotion.remove(job)
        entry = self._entries.pop(job.number)
        if job.output_ids:
            self._count_passed(entry, job)
            if job.ended_by_itself:
                for learned in entry.learned:
                    learned.lengths.count_ended(entry.bin)
                self._learned.on_job_ended()

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        self._do_upkeep(now)
        changes = self._promotion.update(now, in_flight)
        for job in changes.over + changes.begun:
            self._sort(self._entries[job.number])
        return super().walk(now, in_flight)

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        self._promotion.on_iteration_finished([job for job, _ in ran], now)
        edges = self._learned.of_all.lengths.edges
        for job, _ in ran:
            entry = self._entries[job.number]
            if self._age(job, len(job.output_ids)) > edges[entry.bin + 1]:
                self._count_passed(entry, job)
            if self._age(job, job.num_outputs) > entry.key_holds_to or job.num_uncomputed > 1:
                self._sort(entry)

    def on_predicted(self, job: Job) -> None:
        entry = self._entries[job.number]
        entry.learned = self._learned.of_job(job)
        self._sort(entry)

    def recalibrate(self) -> None:
        self._num_to_sort = len(self._entries)

    def describe(self) -> str:
        return (
            f"{self.name}: objective {self._learned.objective}, promotion after "
            f"{self._promotion.starvation_s * 1e3:.0f} ms, {self.limits.describe()}"
        )

    def _sort(self, entry: _Entry) -> None:
        """Sort the job by its current key."""
        job = entry.job
        self._jobs.move(job, self.key(job))
        # The index of a decode changes only at the next edge.
        edges = self._learned.of_all.lengths.edges
        is_decode = job.num_uncomputed <= 1 and job.num_outputs > 0
        index = bisect_right(edges, self._age(job, job.num_outputs))
        entry.key_holds_to = edges[index] - 1 if is_decode and index < len(edges) else -1

    def _most_tokens(self, job: Job) -> int:
        """The most tokens that the policy may expect. A job with a forced length stands for one
        whose length is unknown, and its ``max_tokens`` would tell that length."""
        if job.params.ignore_eos:
            return self._max_model_len
        return self._age(job, job.params.max_tokens)

    def _age(self, job: Job, num_outputs: int) -> int:
        """Output tokens that count as the job's own once it has ``num_outputs``: also those of its
        session's earlier turns, if it inherits them. Lengths are learned in the same way, so they
        are those of sessions at the ends of turns."""
        if not job.session_tokens:
            return num_outputs
        return min(self._max_model_len - 1, job.session_tokens + num_outputs)

    def _count_passed(self, entry: _Entry, job: Job) -> None:
        """Learn that the job is at least as long as it is now. Pending tokens do not count: the job
        may turn out to have ended before them."""
        reached = self._learned.of_all.lengths.bin_of(self._age(job, len(job.output_ids)))
        for learned in entry.learned:
            learned.lengths.count_passed(entry.bin, reached)
        entry.bin = reached

    def _do_upkeep(self, now: float) -> None:
        """Do a part of what is left to do: compute one outdated index, or sort a few jobs."""
        learned = self._learned
        self._notice_updates()
        if not (learned.is_outdated or self._num_to_sort) or not learned.may_do_upkeep(self, now):
            return
        if learned.update_one():
            self._notice_updates()
            return
        num_sorted = min(self._num_to_sort, _SORTED_AT_ONCE, len(self._entries))
        for _ in range(num_sorted):
            number, entry = next(iter(self._entries.items()))
            self._entries.move_to_end(number)
            self._sort(entry)
        self._num_to_sort = max(0, self._num_to_sort - _SORTED_AT_ONCE)

    def _notice_updates(self) -> None:
        """If an index is new, all jobs are to be sorted."""
        if self._num_updates != self._learned.num_updates:
            self._num_updates = self._learned.num_updates
            self._num_to_sort = len(self._entries)
