"""How a batch is filled: the limits of jobs and tokens, and prefill in chunks."""

from __future__ import annotations

import pytest
from fastserve_backend.job import Job, Place
from fastserve_backend.logprobs import PromptLogprobs
from fastserve_backend.offers import TAKEN, OfferAnswer, OfferOutcome
from fastserve_backend.scheduler.base import BatchLimits, Scheduled, fill_batch
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, run_iteration
from policies import POLICIES, UNLIMITED, Listed, make_policy, select


def fill(jobs: list[Job], limits: BatchLimits) -> list[tuple[int, int]]:
    """Fills a batch; returns (job number, tokens) of each entry."""
    batch = fill_batch(Listed(jobs), limits, (), UNLIMITED)
    assert all(isinstance(item, Scheduled) for item in batch)
    return [(job.number, num_tokens) for job, num_tokens in batch]


def prefills(*prompt_lens: int) -> list[Job]:
    return [make_job(number, prompt_len) for number, prompt_len in enumerate(prompt_lens)]


def decodes(first: int, count: int) -> list[Job]:
    return [make_job(number, 8, computed=True) for number in range(first, first + count)]


def scoring(number: int, prompt_len: int) -> Job:
    """A job that asks for the log-probabilities of its prompt."""
    job = make_job(number, prompt_len)
    job.prompt_logprobs = PromptLogprobs(job.prompt_ids, 5)
    return job


def test_log_probabilities_of_a_prompt_take_tokens_of_the_chunk() -> None:
    limits = BatchLimits(9, 2000, 100, scored_chunks={100: 40})
    assert fill([scoring(0, 500), make_job(1, 70)], limits) == [(0, 40)]
    assert fill([make_job(0, 50), scoring(1, 500)], limits) == [(0, 50), (1, 20)]
    assert fill([scoring(0, 21), make_job(1, 70)], limits) == [(0, 21), (1, 47)]
    assert fill([make_job(0, 99), scoring(1, 500), make_job(2, 70)], limits) == [(0, 99), (1, 1)]
    scored = scoring(0, 500)
    scored.on_sent(500)
    scored.num_computed = 0  # it lost its KV, and computes only that again
    assert fill([scored], limits) == [(0, 100)]
    # An iteration without chunks has no bound either.
    assert fill([scoring(0, 500)], BatchLimits(9, 2000)) == [(0, 500)]


@given(data=st.data(), chunk=st.integers(1, 300), num_jobs=st.integers(1, 6))
def test_a_chunk_with_log_probabilities_takes_no_longer_than_one_without(
    data: st.DataObject, chunk: int, num_jobs: int
) -> None:
    scored = data.draw(st.integers(1, chunk))
    limits = BatchLimits(9, 2000, chunk, scored_chunks={chunk: scored})
    jobs = [
        (scoring if data.draw(st.booleans()) else make_job)(n, data.draw(st.integers(2, 400)))
        for n in range(num_jobs)
    ]
    batch = fill_batch(Listed(jobs), limits, (), UNLIMITED)
    used = [tokens * limits.price_of(job) for job, tokens in batch]
    assert batch
    assert sum(used[:-1]) < chunk
    last = batch[-1].num_tokens
    assert sum(used) <= chunk + 1e-6 or last == 1  # the rest of a chunk pays for one token
    if isinstance(jobs[0].prompt_logprobs, PromptLogprobs):
        assert batch[0].num_tokens == min(scored, jobs[0].num_uncomputed)


def test_jobs_are_taken_in_order_up_to_the_most_jobs() -> None:
    assert fill(prefills(3, 1, 2), BatchLimits(2, 100)) == [(0, 3), (1, 1)]
    assert fill(prefills(3, 1, 2), BatchLimits(9, 100)) == [(0, 3), (1, 1), (2, 2)]
    assert fill([], BatchLimits(2, 100)) == []


def test_prompts_wait_behind_one_that_does_not_fit_the_tokens_and_decodes_do_not() -> None:
    limits = BatchLimits(max_seqs=4, max_tokens=12)
    assert fill([*prefills(8, 9, 4), *decodes(3, 2)], limits) == [(0, 8), (3, 1), (4, 1)]
    assert fill([*prefills(9, 9), *decodes(3, 4)], limits) == [(0, 9), (3, 1), (4, 1), (5, 1)]
    # Decodes run however many there are, so a burst leaves the seats full.
    assert fill([*prefills(*[9] * 1000), *decodes(1000, 3)], limits) == [
        (0, 9), (1000, 1), (1001, 1), (1002, 1)
    ]  # fmt: skip


def test_what_might_never_fit_beside_decodes_takes_the_tokens_that_are_left() -> None:
    limits = BatchLimits(max_seqs=4, max_tokens=12)
    long = make_job(9, 10)
    assert fill([*decodes(0, 2), long], limits) == [(0, 1), (1, 1), (9, 10)]
    # Prompts leave later decodes the tokens that these may need.
    assert fill([*prefills(10, 10), *decodes(3, 2)], limits) == [(0, 10), (3, 1), (4, 1)]
    assert fill([*decodes(0, 3), long], limits) == [(0, 1), (1, 1), (2, 1), (9, 9)]
    run_iteration(long, 9)
    assert fill([*decodes(0, 3), long], limits) == [(0, 1), (1, 1), (2, 1), (9, 1)]


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_of_all_tokens_runs_while_others_decode(name: str) -> None:
    limits = BatchLimits(max_seqs=4, max_tokens=12)
    policy = make_policy(name, limits)
    others = [make_job(number, 2, max_tokens=500) for number in range(3)]
    for job in others:
        policy.add(job, 0.0)
    long = make_job(9, 12, max_tokens=500)
    for now in range(9):
        if now == 3:
            policy.add(long, 3.0)
        batch = select(policy, float(now))
        for job, num_tokens in batch:
            run_iteration(job, num_tokens)
        policy.on_iteration_finished(batch, now + 1.0)
    assert long.output_ids


def test_skipped_jobs_take_no_room() -> None:
    jobs = prefills(4, 4, 4)
    batch = fill_batch(Listed(jobs), BatchLimits(2, 8), [0], UNLIMITED)
    assert batch == [(jobs[1], 4), (jobs[2], 4)]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_token_budget(name: str) -> None:
    policy = make_policy(name, BatchLimits(max_seqs=3, max_tokens=12))
    first, too_long, decoding = make_job(0, 8), make_job(1, 9), make_job(2, 8, computed=True)
    for job in (first, too_long, decoding):
        policy.add(job, 0.0)
    batch = select(policy, 0.0)
    assert {job.number for job, _ in batch} in ({0, 2}, {1, 2})
    assert sum(num_tokens for _, num_tokens in batch) <= 12


# --- Chunks -----------------------------------------------------------------------------------


def test_all_prefills_share_one_budget_and_decodes_do_not_use_it() -> None:
    limits = BatchLimits(max_seqs=8, max_tokens=100, prefill_chunk_tokens=10)
    batch = fill([*decodes(5, 2), *prefills(6, 9, 3), *decodes(7, 1)], limits)
    assert batch == [(5, 1), (6, 1), (0, 6), (1, 4), (7, 1)]


def test_a_chunk_takes_no_more_than_the_tokens_of_the_iteration() -> None:
    limits = BatchLimits(max_seqs=8, max_tokens=6, prefill_chunk_tokens=10)
    assert fill([*decodes(5, 2), *prefills(9, 9)], limits) == [(5, 1), (6, 1), (0, 4)]


@pytest.mark.parametrize(
    ("prompt_len", "chunk_tokens", "chunks"),
    [
        (10, 4, [4, 4, 2]),
        (8, 4, [4, 4]),  # the last chunk is exactly the rest
        (9, 4, [4, 4, 1]),  # the last chunk is a single token
        (3, 4, [3]),
        (1, 4, [1]),
        (4, 1, [1, 1, 1, 1]),
    ],
)
def test_a_prompt_runs_in_chunks_and_gets_its_token_with_the_last(
    prompt_len: int, chunk_tokens: int, chunks: list[int]
) -> None:
    job = make_job(0, prompt_len)
    limits = BatchLimits(max_seqs=4, max_tokens=100, prefill_chunk_tokens=chunk_tokens)
    ran = []
    while not job.output_ids:
        ((_, num_tokens),) = fill([job], limits)
        run_iteration(job, num_tokens)
        ran.append(num_tokens)
    assert ran == chunks
    assert fill([job], limits) == [(0, 1)]  # a decode


def test_a_prompt_longer_than_the_tokens_of_an_iteration_runs_in_chunks() -> None:
    job = make_job(0, 25)
    limits = BatchLimits(max_seqs=4, max_tokens=10, prefill_chunk_tokens=16)
    assert fill([job], limits) == [(0, 10)]
    run_iteration(job, 20)
    assert fill([job], limits) == [(0, 5)]


def test_the_most_urgent_prefill_is_never_passed_over_for_want_of_chunk() -> None:
    limits = BatchLimits(max_seqs=2, max_tokens=4, prefill_chunk_tokens=2)
    first, second = prefills(50, 50)
    assert fill([first, second], limits) == [(0, 2)]
    run_iteration(first, 2)
    assert fill([first, second], limits) == [(0, 2)]


# --- Bounded work -----------------------------------------------------------------------------


class WatchedJob(Job):
    """A job that counts how often a decision asks for its size."""

    __slots__ = ("num_looks",)
    num_looks: int

    @property
    def num_uncomputed(self) -> int:
        self.num_looks += 1
        return Job.num_uncomputed.fget(self)  # type: ignore[attr-defined, no-any-return]


def watched(number: int, prompt_len: int) -> WatchedJob:
    plain = make_job(number, prompt_len)
    job = WatchedJob(plain.id, number, plain.prompt_ids, plain.params, 0.0)
    job.num_looks = 0
    return job


@pytest.mark.slow
@pytest.mark.one_of("name")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("limits", "prompt_len", "most"),
    [
        (BatchLimits(16, 2048), 20, 60),  # all fit: the batch is soon full
        (BatchLimits(16, 50), 30, 5000),  # the second does not fit, nor any other
        (BatchLimits(16, 2048, 64), 40, 5000),  # the chunk is used up by the second
    ],
)
def test_a_decision_looks_at_so_many_jobs_however_many_wait(
    name: str, limits: BatchLimits, prompt_len: int, most: int
) -> None:
    policy = make_policy(name, limits)
    jobs = [watched(number, prompt_len) for number in range(10_000)]
    for job in jobs:
        policy.add(job, 0.0)
    for job in jobs:
        job.num_looks = 0
    in_flight: set[int] = set()
    for _ in range(3):  # with three pipeline stages, later decisions skip the jobs in flight
        batch = select(policy, 0.0, in_flight)
        assert batch
        in_flight.update(job.number for job, _ in batch)
    assert sum(job.num_looks for job in jobs) <= 3 * most


class NothingFromTheHost:
    """Memory for all jobs except those whose KV is on the host. It records the offered jobs."""

    def __init__(self, closes_host: bool) -> None:
        self._closed = frozenset({Place.HOST}) if closes_host else frozenset[Place]()
        self.offered: list[int] = []

    def find_prefix(self, job: Job) -> None:
        pass

    def offer(self, job: Job, num_tokens: int) -> OfferAnswer:
        self.offered.append(job.number)
        return OfferAnswer(OfferOutcome.NO_ROOM, self._closed) if job.place is Place.HOST else TAKEN


@pytest.mark.parametrize(("closes_host", "num_offered"), [(False, 3), (True, 1)])
def test_no_more_jobs_are_brought_back_than_have_seats(closes_host: bool, num_offered: int) -> None:
    jobs = decodes(0, 12)
    for job in jobs[:10]:
        job.place = Place.HOST
    memory = NothingFromTheHost(closes_host)
    batch = fill_batch(Listed(jobs), BatchLimits(3, 100), (), memory)
    assert [job.number for job, _ in batch] == [10, 11]
    assert memory.offered == [*range(num_offered), 10, 11]
