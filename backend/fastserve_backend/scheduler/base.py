"""What the engine asks of a policy, and how a batch is filled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastserve_backend.job import Job


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one iteration."""

    max_seqs: int
    max_tokens: int
    """Prefill and decode tokens together; at least ``max_seqs``."""
    prefill_chunk_tokens: int | None = None
    """Most prefill tokens, all jobs together: a longer prefill runs in chunks, over several
    iterations (Sarathi-Serve, Agrawal et al. 2024). None: every prefill runs whole that fits beside
    a batch of decodes."""

    def tokens_of(
        self, needed: int, tokens_left: int, chunk_left: int | None, seats_left: int
    ) -> int:
        """Of the tokens that a job needs, how many it gets in this iteration; 0 or less: none.

        Args:
            seats_left: of the batch, behind this job.
        """
        if chunk_left is not None and needed > 1:
            needed = min(needed, chunk_left, tokens_left)
        if needed <= tokens_left:
            return needed
        if needed > self.max_tokens - (self.max_seqs - 1):
            # Jobs that decode might never leave room for the whole of it: it takes what those leave
            # that may follow.
            return tokens_left - seats_left
        return 0

    def describe(self) -> str:
        chunk = self.prefill_chunk_tokens
        chunks = "" if chunk is None else f", prefill in chunks of {chunk}"
        return f"at most {self.max_seqs} jobs and {self.max_tokens} tokens an iteration{chunks}"


class Scheduled(NamedTuple):
    """A job's part of an iteration: its next ``num_tokens`` tokens without K and V."""

    job: Job
    num_tokens: int


class IterationTimes(Protocol):
    """Predicted execution time until a job's next token, in seconds (FastServe §4.1)."""

    def prefill_s(self, num_tokens: int) -> float: ...

    def decode_s(self, context_tokens: int) -> float: ...


def time_to_next_token(job: Job, times: IterationTimes) -> float:
    """Seconds that the job has to run before it has its next token."""
    if job.num_uncomputed == 1:
        return times.decode_s(job.num_tokens)
    return times.prefill_s(job.num_uncomputed)


class Memory(Protocol):
    """What a batch needs beside the limits: KV blocks (``kv_cache.manager.KVManager``)."""

    @property
    def is_exhausted(self) -> bool:
        """Nothing that is offered from now on in this round would be taken."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether the job that was offered last was not taken because others are about to compute
        what it would."""
        ...

    def recall(self, job: Job) -> None:
        """The job may be offered next: what others have computed of its tokens it need not."""
        ...

    def take(self, job: Job, num_tokens: int) -> bool:
        """Whether the job has the memory for its next ``num_tokens`` tokens now. Jobs are offered
        in order of priority."""
        ...


class Unlimited:
    """Memory for everyone."""

    is_exhausted = is_waiting = False

    def recall(self, job: Job) -> None:
        pass

    def take(self, job: Job, num_tokens: int) -> bool:
        return True


UNLIMITED = Unlimited()

Urgency = Callable[[Job], tuple[float, float]]
"""A key by which jobs sort by when they will run next, the soonest first."""


class Policy(Protocol):
    """Owns the order of all unfinished jobs. Called by one thread, with the time passed in."""

    limits: BatchLimits

    @property
    def num_demotions(self) -> int:
        """How often a job sank to a lower queue or outlived its prediction, since the start."""
        ...

    @property
    def num_promotions(self) -> int:
        """How often a starving job came before all others, since the start."""
        ...

    @property
    def quanta_s(self) -> Sequence[float | None]:
        """Of each queue, highest first: its quantum in seconds; None: it has none."""
        ...

    def add(self, job: Job, now: float) -> None:
        """A new job; it must not be known yet."""
        ...

    def remove(self, job: Job) -> None:
        """The job ended, for whatever reason; it must be known."""
        ...

    def walk(self, now: float, in_flight: Collection[int]) -> Iterable[Job]:
        """All jobs, most urgent first, for ``fill_batch``: of use until anything else is called.
        Promotes who starves.

        Args:
            in_flight: numbers of the jobs in unfinished iterations, which do not starve.
        """
        ...

    def iteration_done(self, jobs: Sequence[Job], elapsed_s: float, now: float) -> None:
        """The iteration of these jobs took ``elapsed_s``, or is predicted to; they have its tokens,
        be they pending. Not called for those that are known to end with it."""
        ...

    def overran(self, jobs: Sequence[Job], seconds: float, in_flight: Collection[int]) -> None:
        """The latest iteration done of these jobs took so much longer than predicted; less than 0:
        shorter. Those ``in_flight``, by number, are in the next one already."""
        ...

    def predicted(self, job: Job) -> None:
        """The job's ``predicted_tokens`` were set or changed; it is known, and may be in flight."""
        ...

    def recalibrate(self) -> None:
        """The iteration times have drifted: derive from them again what was derived before."""
        ...

    def urgency(self, now: float) -> Urgency:
        """When jobs will run next, estimated: what KV blocks are swapped by. Of use until jobs are
        added, removed or run."""
        ...

    def level_sizes(self) -> Sequence[int]:
        """Number of jobs in each queue, highest first."""
        ...

    def describe(self) -> str:
        """Name and derived parameters, one line for the log."""
        ...


# Of prompts that wait for tokens, so many are passed over for the decodes behind them: they take
# about a millisecond.
_MOST_PASSED_OVER = 4096


def fill_batch(
    jobs: Iterable[Job], limits: BatchLimits, in_flight: Collection[int], memory: Memory
) -> list[Scheduled]:
    """Take jobs in order while they fit, but for those in flight: with pipeline stages the next
    batch is chosen from the waiting jobs while others run (FastServe §4.3). Empty only if all are
    in flight, wait for those, or have no memory.

    A prompt that exceeds the token limit waits, and so do all prompts behind it, but decodes (one
    token) behind it still run; in the next iteration, behind decodes alone, it fits. Jobs without
    memory are passed over, until no other can have any. A job that waits for what others compute
    keeps the tokens that it was to have: no prompt behind it makes it wait longer. Costs O(batch +
    jobs in flight + jobs passed over).
    """
    batch: list[Scheduled] = []
    tokens_left = limits.max_tokens
    chunk_left = limits.prefill_chunk_tokens
    prompts_passed_over = 0
    for job in jobs:
        if len(batch) == limits.max_seqs or tokens_left == 0:
            break
        if prompts_passed_over and job.num_uncomputed > 1:
            prompts_passed_over += 1
            if prompts_passed_over == _MOST_PASSED_OVER:
                break
            continue
        if job.number in in_flight:
            continue
        memory.recall(job)
        seats_left = limits.max_seqs - len(batch) - 1
        needed = limits.tokens_of(job.num_uncomputed, tokens_left, chunk_left, seats_left)
        if needed <= 0:
            prompts_passed_over = 1
            continue
        if memory.take(job, needed):
            batch.append(Scheduled(job, needed))
        elif memory.is_exhausted:
            break
        elif not memory.is_waiting:
            continue
        tokens_left -= needed
        if chunk_left is not None and job.num_uncomputed > 1:
            chunk_left -= needed
    return batch
