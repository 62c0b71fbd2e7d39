"""What the engine asks of a policy, and how a batch (the jobs of an iteration) is filled."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, Protocol, runtime_checkable

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import EVERYWHERE, TAKEN, NextRunEstimate, OfferOutcome
from fastserve_backend.scheduler.memory import Memory
from fastserve_backend.scheduler.walk import Walk

# How much a waiting prompt counts, in decodes. With 1, chunks stay so small under overload that
# tokens/s fall by 8% (chat on the systems of benchmarks/scheduling_race.py).
_PROMPT_WEIGHT = 20
# A price is a quotient: a chunk must pay for all tokens from which its price was derived.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The sizes of prefill chunks that an iteration may choose from, and which one is best.

    An iteration with a chunk of c tokens takes t(c). So a prefill token takes t(c) / c, and delays
    each waiting prompt by that. It delays each decode too, but meanwhile the decode gets 1 / c of a
    token, for which it would need t(1) anyway. The best chunk minimizes the sum of all delays::

        ((w · prompts + decodes) · t(c) − decodes · t(1)) / c

    A prompt has a weight w, because it also delays prompts that arrive while it waits.

    Up to the knee of the profile, an iteration takes as long as without prefill. So with many
    decodes the best chunk is at the knee. With many prompts it is the largest.
    """

    seconds: Mapping[int, float]
    """By size in tokens: seconds of an iteration with such a chunk alone."""
    decode_s: float
    """Seconds of an iteration with one decode."""

    def best(self, num_prompts: int, num_decodes: int) -> int:
        """The best chunk, in tokens.

        Args:
            num_prompts: jobs that wait for their first token.
            num_decodes: jobs that decode.
        """
        num_jobs = _PROMPT_WEIGHT * num_prompts + num_decodes
        decodes_s = num_decodes * self.decode_s
        return min(
            self.seconds, key=lambda size: (num_jobs * self.seconds[size] - decodes_s) / size
        )


@dataclass(slots=True)
class BatchLimits:
    """The bounds of one iteration.

    All policies of an engine share one object. When the iteration times drift, ``make_policy``'s
    policy changes its ``max_seqs`` and ``scored_chunks``, before it calls ``recalibrate`` of the
    others.
    """

    max_seqs: int
    max_tokens: int
    """Prefill and decode tokens together; at least ``max_seqs``."""
    prefill_chunk_tokens: int | None = None
    """Most prefill tokens of all jobs together. A longer prefill runs in chunks, over several
    iterations (Sarathi-Serve, Agrawal et al. 2024). None: a prefill runs in one iteration, if it
    fits beside a batch of decodes."""
    chunk_sizes: ChunkSizes | None = None
    """Each iteration takes its ``prefill_chunk_tokens`` from these. None: they never change."""
    bound_by_times: bool = False
    """Whether the iteration times alone allow no more ``max_seqs``."""
    scored_chunks: Mapping[int, int] = field(default_factory=dict)
    """By ``prefill_chunk_tokens``: how many tokens take as long if their log-probabilities are
    computed too."""

    @property
    def job_tokens(self) -> int:
        """Most tokens of one job."""
        return self.prefill_chunk_tokens or self.max_tokens

    def for_load(self, num_prompts: int, num_decodes: int) -> BatchLimits:
        """The limits of one iteration. The arguments are those of ``ChunkSizes.best``."""
        if self.chunk_sizes is None:
            return self
        chunk_tokens = self.chunk_sizes.best(num_prompts, num_decodes)
        return BatchLimits(
            self.max_seqs, self.max_tokens, chunk_tokens, scored_chunks=self.scored_chunks
        )

    def price_of(self, job: Job) -> float:
        """How many tokens of the chunk a token of the job takes: more than one if its
        log-probabilities are computed too. So the iteration takes no longer."""
        chunk = self.prefill_chunk_tokens
        if chunk is None or not job.needs_whole_prompt:
            return 1.0
        return chunk / self.scored_chunks.get(chunk, chunk)

    def tokens_of(
        self,
        needed: int,
        tokens_left: int,
        chunk_left: int | None,
        seats_left: int,
        price: float = 1.0,
    ) -> int:
        """How many of its ``needed`` tokens a job gets in this iteration; 0 or less: none.

        Args:
            seats_left: jobs that the batch can still take after this job.
            price: ``price_of`` the job. However high it is, the rest of a chunk pays for a token.
        """
        if chunk_left is not None and needed > 1:
            affordable = max(1, int(chunk_left / price + _ROUNDING)) if chunk_left > 0 else 0
            needed = min(needed, affordable, tokens_left)
        if needed <= tokens_left:
            return needed
        if needed > self.max_tokens - (self.max_seqs - 1):
            # Decodes might never leave room for the whole prefill. So it takes what is left when
            # each later seat keeps one token.
            return tokens_left - seats_left
        return 0

    def describe(self) -> str:
        chunk = self.prefill_chunk_tokens
        chunks = "" if chunk is None else f", prefill in chunks of {chunk}"
        if self.chunk_sizes is not None:
            chunks = f", prefill in chunks of {min(self.chunk_sizes.seconds)} to {chunk}"
        jobs = "1 job" if self.max_seqs == 1 else f"{self.max_seqs} jobs"
        return f"at most {jobs} and {self.max_tokens} tokens an iteration{chunks}"


class Scheduled(NamedTuple):
    """A job's part of an iteration: it computes K and V of its next ``num_tokens`` tokens."""

    job: Job
    num_tokens: int


class IterationTimes(Protocol):
    """Predicted execution time until a job's next token, in seconds (FastServe §4.1)."""

    def prefill_s(self, num_tokens: int) -> float: ...

    def decode_s(self, context_tokens: int) -> float: ...

    def decodes_s(self, num_jobs: int, context_tokens: int) -> float:
        """Seconds of an iteration that decodes ``num_jobs`` jobs with this context each."""
        ...

    def score_s(self, num_tokens: int) -> float:
        """Seconds that the log-probabilities of so many prompt tokens take, beside the tokens."""
        ...


def own_time_s(job: Job, num_tokens: int, times: IterationTimes) -> float:
    """Seconds that the last ``num_tokens`` tokens of a job would have taken alone.

    Other jobs of the same iteration do not count. All chunks of a prefill together cost as much as
    the whole prefill.
    """
    if num_tokens == 1:
        return times.decode_s(job.num_computed)
    first = job.num_computed - num_tokens
    before_s = times.prefill_s(first) if first else 0.0
    return times.prefill_s(job.num_computed) - before_s


def time_to_next_token(job: Job, times: IterationTimes) -> float:
    """Seconds that the job must run to get its next token."""
    if job.num_uncomputed == 1:
        return times.decode_s(job.num_tokens)
    return times.prefill_s(job.num_uncomputed)


# A prefill is minor up to this share of the predicted time of the job's decodes.
_MINOR_SHARE = 0.1


def is_owed_first_token(job: Job, times: IterationTimes) -> bool:
    """Whether no prediction may delay the job's first token.

    That holds while the prefill is a minor part of the job, since an early prefill then delays
    other jobs little. Where prompts are most of the work, ordering them by predictions is worth
    more.
    """
    if job.num_outputs or job.predicted_tokens is None:
        return False
    decodes_s = job.predicted_tokens * times.decode_s(job.num_tokens)
    return time_to_next_token(job, times) <= _MINOR_SHARE * decodes_s


class Policy(Protocol):
    """Owns the order of all unfinished jobs. One thread calls it, with the time in seconds."""

    @property
    def limits(self) -> BatchLimits:
        """Of the next batch."""
        ...

    @property
    def num_demotions(self) -> int:
        """How often jobs sank to a lower queue or outlived their predictions, since the start."""
        ...

    @property
    def num_promotions(self) -> int:
        """How often a starving job got a turn (was promoted), since the start."""
        ...

    @property
    def quanta_s(self) -> Sequence[float | None]:
        """The quantum of each queue in seconds, highest queue first; None: it has none."""
        ...

    def has_turn(self, job: Job) -> bool:
        """Whether the job has a turn: it starved, so it comes before all others for a while."""
        ...

    def add(self, job: Job, now: float) -> None:
        """A new job arrived. It must not be known yet."""
        ...

    def remove(self, job: Job) -> None:
        """The job ended, for whatever reason. It must be known."""
        ...

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        """All jobs for ``fill_batch``, the most urgent first. Gives turns to starving jobs.

        The walk is valid until another method is called.

        Args:
            in_flight: numbers of the jobs in unfinished iterations, which do not starve.
        """
        ...

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        """The limits of the next iteration. Called after ``walk``.

        Args:
            num_prompts, num_decodes: as of ``BatchLimits.for_load``.
        """
        ...

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        """These jobs run now, and count their tokens of the iteration as computed."""
        ...

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        """An iteration has ended, or counts as ended, in which these jobs ran these tokens.

        The jobs' new tokens may still be pending. Jobs that certainly end with the iteration are
        left out.
        """
        ...

    def on_predicted(self, job: Job) -> None:
        """The job's ``predicted_tokens`` changed. The job must be known, and may be in flight."""
        ...

    def recalibrate(self) -> None:
        """The iteration times have drifted: compute again what was derived from them."""
        ...

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        """Estimates when jobs run next. KV blocks are swapped in this order.

        The estimate is valid until a job is added, removed or run.
        """
        ...

    def on_place_changed(self, job: Job) -> None:
        """The job's ``place`` has changed. The job must be known."""
        ...

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        """Jobs whose KV is at ``place``, those that run next first, or those that run last.

        The order is that of the estimate, unless that would need a look at all jobs.

        Args:
            estimate: from ``next_run_estimate``. The iterator is valid as long as the estimate.
        """
        ...

    def level_sizes(self) -> Sequence[int]:
        """Number of jobs in each queue, highest first."""
        ...

    def describe(self) -> str:
        """Name and derived parameters, as one line for the log."""
        ...


@runtime_checkable
class ChargesTenants(Protocol):
    """A policy that divides the machine among tenants."""

    def charge(self, tenant: str, seconds: float) -> None:
        """The tenant has used the machine for so long, beside the tokens of its jobs."""
        ...


def summed_level_sizes(policies: Sequence[Policy]) -> Sequence[int]:
    """Number of jobs in each queue, of all these policies together.

    A policy that was made after the iteration times drifted may have more queues than the first.
    Those count as the last one of the first.
    """
    first, *others = (policy.level_sizes() for policy in policies)
    if not others:
        return first
    summed = [sum(level) for level in zip_longest(first, *others, fillvalue=0)]
    last = len(first) - 1
    return [*summed[:last], sum(summed[last:])]


def fill_batch(
    jobs: Walk, limits: BatchLimits, in_flight: Collection[int], memory: Memory
) -> list[Scheduled]:
    """Take jobs in order while they fit, without those in flight: with pipeline stages the next
    batch is chosen while others run (FastServe §4.3). The batch is empty only if all jobs are in
    flight, wait for jobs in flight, or have no memory.

    A prompt that exceeds the token limit waits, and so do all prompts behind it. Decodes (one
    token) behind it still run. In the next iteration, the prompt fits behind decodes alone.

    Jobs without memory are passed over. A job that waits for a prefix keeps its tokens of the
    iteration, so that no prompt behind it makes it wait longer. Jobs on the host are no longer
    looked at once as many wait for their KV as an iteration has seats, nor are the jobs that the
    memory closes the round to. Costs O(batch + jobs in flight + jobs with KV on the device that are
    passed over).
    """
    batch: list[Scheduled] = []
    tokens_left = limits.max_tokens
    chunk_left = limits.prefill_chunk_tokens
    prompts_wait = False
    num_from_host = 0  # jobs that wait for their KV
    for job in jobs:
        if len(batch) == limits.max_seqs or tokens_left == 0:
            break
        if (prompts_wait and job.num_uncomputed > 1) or job.number in in_flight:
            continue
        memory.find_prefix(job)
        needed = job.num_uncomputed
        is_prefill = needed > 1
        if is_prefill:
            seats_left = limits.max_seqs - len(batch) - 1
            price = limits.price_of(job)
            needed = limits.tokens_of(needed, tokens_left, chunk_left, seats_left, price)
        if needed <= 0:
            prompts_wait = True
            jobs.skip(Place.NOWHERE)
            continue
        answer = memory.offer(job, needed)
        if answer is TAKEN:
            batch.append(Scheduled(job, needed))
        else:
            outcome, closed = answer
            if closed == EVERYWHERE:
                break
            num_from_host += job.place is Place.HOST
            if num_from_host == limits.max_seqs:
                jobs.skip(Place.HOST)
            for place in closed:
                jobs.skip(place)
            # Once new jobs are closed, no prompt behind can take the tokens.
            if outcome is not OfferOutcome.WAITS_FOR_PREFIX or Place.NOWHERE in closed:
                continue
        tokens_left -= needed
        if is_prefill and chunk_left is not None:
            chunk_left -= math.ceil(needed * price)
    return batch
