"""The policy for latency objectives: who runs first, who steps back, how long iterations are."""

from __future__ import annotations

import random
from array import array

import pytest
from fastserve_backend.job import FinishReason, Job, ServiceLevel
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import BatchLimits, ChunkSizes, Policy, Scheduled, fill_batch
from fastserve_backend.scheduler.fair_shares import FairShares
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.gittins_index import Capacity
from fastserve_backend.scheduler.learned_lengths import LearnedLengths
from fastserve_backend.scheduler.priority_classes import PriorityClasses
from fastserve_backend.scheduler.slo import SLO
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import run_iteration
from matrices import random_examples
from policies import ENDLESS, NEVER_S, TIMES, UNLIMITED, iterate, one_job, select


def policy(
    limits: BatchLimits | None = None,
    starvation_s: float = NEVER_S,
    kind: type[Gittins] = SLO,
) -> Gittins:
    limits = limits or one_job()
    return kind(
        limits,
        TIMES,
        LearnedLengths(200, "jct", Capacity(limits.max_seqs, ENDLESS)),
        max_model_len=200,
        starvation_s=starvation_s,
    )


def job(
    number: int,
    prompt_len: int,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    max_tokens: int = 100,
    priority: int = 0,
    tenant: str = "",
) -> Job:
    return Job(
        id=f"job-{number}",
        number=number,
        prompt_ids=array("i", range(prompt_len)),
        params=SamplingParams(max_tokens=max_tokens),
        arrival_s=0.0,
        service=ServiceLevel(priority, ttft_s, tpot_s, tenant),
    )


def first(slo: Policy, now: float) -> Job:
    return select(slo, now)[0].job


# --- First tokens -----------------------------------------------------------------------------


def test_a_first_token_with_an_objective_comes_before_shorter_jobs_without() -> None:
    slo = policy()
    batch, interactive = job(0, 1), job(1, 5, ttft_s=20.0)
    slo.add(batch, 0.0)
    slo.add(interactive, 0.0)
    assert first(slo, 0.0) is interactive


def test_the_prompt_that_is_due_first_runs_and_of_equal_ones_the_shorter() -> None:
    slo = policy()
    late, long, short = job(0, 4, ttft_s=50.0), job(1, 6, ttft_s=20.0), job(2, 4, ttft_s=20.0)
    for one in (late, long, short):
        slo.add(one, 0.0)
    assert [one.number for one in slo.walk(0.0, ())] == [2, 1, 0]


def test_a_prompt_that_cannot_be_in_time_steps_back_behind_all_that_can() -> None:
    slo = policy()
    hopeless, batch, possible = job(0, 10, ttft_s=15.0), job(1, 1), job(2, 10, ttft_s=100.0)
    for one in (hopeless, batch, possible):
        slo.add(one, 0.0)
    assert first(slo, 5.0) is hopeless, "it takes 10 s, so it can just be in time"
    assert [one.number for one in slo.walk(5.5, ())] == [2, 1, 0]


def test_thousands_of_lost_prompts_step_back_a_few_at_a_time() -> None:
    slo = policy()
    lost = [job(number, 10, ttft_s=15.0) for number in range(100)]
    possible = job(100, 1, ttft_s=50.0)
    for one in (*lost, possible):
        slo.add(one, 0.0)
    assert first(slo, 6.0) is not possible
    for _ in range(10):
        slo.walk(6.0, ())
    assert first(slo, 6.0) is possible


# --- Later tokens -----------------------------------------------------------------------------


def decoding(slo: Policy, one: Job, num_tokens: int) -> Job:
    """The job gets tokens until it has so many, all at time 0."""
    slo.add(one, 0.0)
    while len(one.output_ids) < num_tokens:
        run_iteration(one)
        slo.on_iteration_finished([Scheduled(one, 1)], 0.0)
    return one


def test_a_job_that_is_ahead_of_its_objective_waits_for_urgent_ones() -> None:
    slo = policy()
    ahead = decoding(slo, job(0, 1, tpot_s=2.0), num_tokens=20)  # the next is due at 38.8
    prompt = job(1, 5, ttft_s=60.0)
    slo.add(prompt, 0.0)
    assert first(slo, 0.0) is prompt
    assert first(slo, 32.0) is prompt
    assert first(slo, 33.0) is ahead, "its token is due in less than 3 tokens' time"


def test_a_job_that_is_ahead_comes_before_jobs_without_objectives() -> None:
    slo = policy()
    slo.add(batch := job(0, 1), 0.0)
    ahead = decoding(slo, job(1, 50, tpot_s=2.0), num_tokens=20)
    assert [one.number for one in slo.walk(0.0, ())] == [ahead.number, batch.number]


def test_a_late_job_may_catch_up_until_it_is_ten_tokens_late() -> None:
    slo = policy()
    late = decoding(slo, job(0, 5, tpot_s=2.0), num_tokens=2)  # the next is due at 3.88
    slo.add(patient := job(1, 1, ttft_s=500.0), 0.0)
    assert first(slo, 23.8) is late
    assert first(slo, 23.9) is patient


def test_without_an_objective_for_the_first_token_it_is_ordered_as_by_default() -> None:
    slo = policy()
    rated, batch = job(0, 9, tpot_s=2.0), job(1, 1)
    slo.add(rated, 0.0)
    slo.add(batch, 0.0)
    assert first(slo, 0.0) is batch
    for _ in range(9):
        run_iteration(rated)
    slo.on_iteration_finished([Scheduled(rated, 9)], 9.0)
    assert first(slo, 9.0) is rated, "now its tokens have deadlines"


def test_with_an_objective_for_the_first_token_alone_a_job_is_batch_after_it() -> None:
    slo = policy()
    interactive, other = job(0, 9, ttft_s=60.0), job(1, 9, ttft_s=200.0)
    slo.add(interactive, 0.0)
    slo.add(other, 0.0)
    assert iterate(slo, 0.0) == [interactive]
    assert first(slo, 1.0) is other


def test_all_deadlines_are_met_where_they_can_be() -> None:
    """Two jobs want a token every 4 s, so half of the time is left for a third one."""
    slo = policy()
    rated = [job(0, 1, ttft_s=6.0, tpot_s=4.0), job(1, 1, ttft_s=6.0, tpot_s=4.0)]
    for one in (*rated, batch := job(2, 1)):
        slo.add(one, 0.0)
    for now in range(200):
        iterate(slo, float(now))
        if all(len(one.output_ids) == 40 for one in rated):
            break
        for one in rated:
            assert len(one.output_ids) >= (now + 1 - 6) // 4
    assert not batch.output_ids, "jobs ahead of their objectives come before it"


# --- The size of an iteration -----------------------------------------------------------------

SIZES = ChunkSizes({4: 4.0, 8: 8.0, 16: 16.0}, decode_s=1.0)
LIMITS = BatchLimits(8, 24, 16, SIZES)


def test_chunks_are_as_large_as_the_slack_of_the_decodes_allows() -> None:
    slo = policy(LIMITS)
    decoding(slo, job(0, 1, tpot_s=10.0), num_tokens=2)  # the next is due at 19.4
    slo.add(job(1, 50, ttft_s=200.0), 0.0)
    chunks = [slo.limits_for(now, 1, 1).prefill_chunk_tokens for now in (0.0, 5.0, 12.0, 25.0)]
    assert chunks == [16, 8, 4, 4]


def test_a_pressed_prompt_leaves_no_seats_for_jobs_that_can_wait() -> None:
    slo = policy(LIMITS)
    for number in range(3):
        slo.add(job(number, 1), 0.0)
    decoding(slo, job(3, 1, tpot_s=10.0), num_tokens=30)  # far ahead
    slo.add(prompt := job(4, 20, ttft_s=100.0), 0.0)
    seats = [slo.limits_for(now, 4, 1).max_seqs for now in (0.0, 1.0, 31.0)]
    assert seats == [8, 3, 2]
    slo.remove(prompt)
    assert slo.limits_for(31.0, 3, 1).max_seqs == 8


@pytest.mark.parametrize("limits", [LIMITS, BatchLimits(8, 24, 16), BatchLimits(8, 24)])
def test_without_objectives_the_limits_are_those_of_the_load(limits: BatchLimits) -> None:
    slo = policy(limits)
    slo.add(job(0, 5), 0.0)
    assert slo.limits_for(0.0, 1, 3) == limits.for_load(1, 3)


def test_the_most_urgent_priority_decides_how_long_an_iteration_may_be() -> None:
    classes = PriorityClasses(lambda: policy(LIMITS))
    classes.add(job(0, 20, ttft_s=100.0), 0.0)
    assert classes.limits_for(50.0, 1, 0).max_seqs == 2
    classes.add(job(1, 20, priority=-1), 0.0)
    assert classes.limits_for(50.0, 2, 0) == LIMITS.for_load(2, 0)
    classes.add(job(2, 20, ttft_s=100.0, priority=-1), 0.0)
    assert classes.limits_for(50.0, 3, 0).max_seqs == 2


def test_a_tenant_that_is_pressed_takes_no_seats_from_other_tenants() -> None:
    shares = FairShares(policy(LIMITS), TIMES, {}, max_model_len=200)
    shares.add(job(0, 20, ttft_s=100.0, tenant="a"), 0.0)
    assert shares.limits_for(50.0, 1, 0).max_seqs == 2
    shares.add(job(1, 20, tenant="b"), 0.0)
    assert shares.limits_for(50.0, 2, 0).max_seqs == 8


# --- Properties -------------------------------------------------------------------------------

NUM_JOBS = 25


def run_history(slo: Gittins, services: list[ServiceLevel], seed: int) -> list[list[int]]:
    """Runs jobs with random arrivals and lengths to their ends; returns the batches."""
    rng = random.Random(seed)
    jobs = [
        job(
            number,
            rng.randint(1, 30),
            services[number].ttft_slo_s,
            services[number].tpot_slo_s,
            max_tokens=rng.randint(1, 30),
        )
        for number in range(NUM_JOBS)
    ]
    arrivals = sorted((rng.uniform(0.0, 300.0), number) for number in range(NUM_JOBS))
    now, known, batches = 0.0, set[int](), list[list[int]]()
    while arrivals or known:
        if not known:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            arrived_s, number = arrivals.pop(0)
            slo.add(jobs[number], arrived_s)
            known.add(number)
        walk = slo.walk(now, ())
        batch = fill_batch(walk, slo.limits_for(now, len(known), len(known)), (), UNLIMITED)
        assert batch, "some job can always run"
        batches.append([one.number for one, _ in batch])
        for one, num_tokens in batch:
            run_iteration(one, num_tokens)
        now += 1.0 + 0.5 * sum(num_tokens for _, num_tokens in batch)
        slo.on_iteration_finished(batch, now)
        for one, _ in batch:
            if len(one.output_ids) == one.params.max_tokens:
                one.finish_reason = FinishReason.STOP
                slo.remove(one)
                known.remove(one.number)
    assert slo.level_sizes() == (0,)
    return batches


@pytest.mark.slow
@random_examples(60)
@given(seed=st.integers(0, 2**32), starvation_s=st.sampled_from([20.0, NEVER_S]))
def test_without_objectives_all_decisions_are_those_of_gittins(
    seed: int, starvation_s: float
) -> None:
    services = [ServiceLevel()] * NUM_JOBS
    of_slo, of_gittins = (
        run_history(policy(LIMITS, starvation_s, kind), services, seed) for kind in (SLO, Gittins)
    )
    assert of_slo == of_gittins


@pytest.mark.slow
@random_examples(60)
@given(
    seed=st.integers(0, 2**32),
    services=st.lists(
        st.builds(
            ServiceLevel,
            ttft_slo_s=st.none() | st.floats(0.1, 200.0),
            tpot_slo_s=st.none() | st.floats(0.1, 20.0),
        ),
        min_size=NUM_JOBS,
        max_size=NUM_JOBS,
    ),
    limits=st.sampled_from([LIMITS, BatchLimits(8, 24, 16), one_job()]),
)
def test_no_job_is_lost_whatever_the_objectives(
    seed: int, services: list[ServiceLevel], limits: BatchLimits
) -> None:
    slo = policy(limits, 20.0)
    run_history(slo, services, seed)
    assert slo.limits_for(1e6, 1, 1) == limits.for_load(1, 1), "no deadline is left"


@pytest.mark.slow
@settings(max_examples=30)
@given(num_batch=st.integers(1, 5), prompt_len=st.integers(1, 10))
def test_jobs_that_wait_for_urgent_ones_have_a_bound(num_batch: int, prompt_len: int) -> None:
    """Urgent jobs arrive faster than they run, for ever. One seat, so one turn at a time."""
    starvation_s = 50.0
    slo = policy(starvation_s=starvation_s)
    batch = [job(number, prompt_len) for number in range(num_batch)]
    for one in batch:
        slo.add(one, 0.0)
    # As of Promotion, with a tenth of the usual time: each turn is a first token.
    bound_s = starvation_s + (1 + 10 / 0.1) * (num_batch + 1) * prompt_len
    number, now = 100, 0.0
    while any(not one.output_ids for one in batch):
        assert now <= bound_s
        slo.add(job(number, 1, ttft_s=60.0), now)
        number += 1
        (ran, num_tokens) = select(slo, now)[0]
        run_iteration(ran, num_tokens)
        now += num_tokens
        slo.on_iteration_finished([Scheduled(ran, num_tokens)], now)
        if ran not in batch:
            ran.finish_reason = FinishReason.STOP
            slo.remove(ran)
