"""What the engine asks of a policy, and how a batch is filled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastserve_backend.job import Job


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one iteration."""

    max_seqs: int
    max_tokens: int
    """Prefill and decode tokens together; at least the longest job, or that one would never run."""


class IterationTimes(Protocol):
    """Predicted execution time of a job's next iteration, in seconds (FastServe §4.1)."""

    def prefill_s(self, num_tokens: int) -> float: ...

    def decode_s(self, context_tokens: int) -> float: ...


class Policy(Protocol):
    """Owns the order of all unfinished jobs. Called by one thread, with the time passed in."""

    def add(self, job: Job, now: float) -> None:
        """A new job; it must not be known yet."""
        ...

    def remove(self, job: Job) -> None:
        """The job ended, for whatever reason; it must be known."""
        ...

    def select(self, now: float) -> list[Job]:
        """Jobs to run next, most urgent first, within the batch limits.

        Empty only if no job is known. Jobs selected are not selected again before
        ``iteration_done`` names them.
        """
        ...

    def iteration_done(self, jobs: Sequence[Job], elapsed_s: float, now: float) -> None:
        """The iteration of these jobs took ``elapsed_s``. Called before ``remove`` of those that
        ended in it. Jobs that ``select`` returned and that did not run (no memory) are passed to
        ``not_run`` instead."""
        ...

    def not_run(self, jobs: Sequence[Job]) -> None:
        """These selected jobs did not run; they keep their places."""
        ...

    def by_lowest_priority(self) -> Iterator[Job]:
        """All known jobs, least urgent first."""
        ...

    def level_sizes(self) -> Sequence[int]:
        """Number of jobs in each queue, highest first."""
        ...

    def describe(self) -> str:
        """Name and derived parameters, one line for the log."""
        ...


def fill_batch(jobs: Iterable[Job], limits: BatchLimits, skip: Callable[[Job], bool]) -> list[Job]:
    """Take jobs in order while they fit; the walk is O(batch), however many jobs wait.

    A job that does not fit is passed over, so that decodes (one token) behind a long prefill still
    run; it comes first in the next iteration. After the first such job at most ``max_seqs`` more
    are looked at.
    """
    batch: list[Job] = []
    tokens_left = limits.max_tokens
    looks_left: int | None = None
    for job in jobs:
        if len(batch) == limits.max_seqs or tokens_left == 0:
            break
        if skip(job):
            continue
        if looks_left is not None:
            if looks_left == 0:
                break
            looks_left -= 1
        needed = job.num_uncomputed
        if needed <= tokens_left:
            batch.append(job)
            tokens_left -= needed
        elif looks_left is None:
            looks_left = limits.max_seqs
    return batch
