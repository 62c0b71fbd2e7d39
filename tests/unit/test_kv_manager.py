"""Which jobs get blocks when there are too few: under all strategies, and without swapping."""

from __future__ import annotations

import pytest
from fastserve_backend.job import Place
from fastserve_backend.kv_cache.transfers import TransferKind
from fastserve_backend.offers import EVERYWHERE
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.scheduler.base import BatchLimits, fill_batch
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, run_iteration
from kv_desk import FAST_LINK, SLOW_LINK, Desk, jobs_of
from matrices import random_examples
from policies import Listed

STRATEGIES = ("defer", "recompute", "reactive", "proactive")


# --- Every strategy ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_fit(strategy: str) -> None:
    desk = Desk(10, strategy=strategy)
    jobs = jobs_of(30, 30, 30, max_tokens=2)
    assert desk.offer(*jobs) == jobs
    assert desk.held(*jobs) == [2, 2, 2]
    assert desk.begun == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_chunk_takes_blocks_for_its_own_tokens_only(strategy: str) -> None:
    desk = Desk(10, strategy=strategy)
    (job,) = jobs_of(100, max_tokens=2)
    desk.offer(job, tokens=20)
    assert desk.held(job) == [2]
    job.num_computed = 20
    desk.offer(job, tokens=12)
    assert desk.held(job) == [2]  # 32 tokens: exactly full
    job.num_computed = 32
    desk.offer(job, tokens=68)
    assert desk.held(job) == [7]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_takes_nothing_from_a_more_urgent_one(strategy: str) -> None:
    desk = Desk(4, strategy=strategy)
    urgent, newcomer = jobs_of(60, 16, max_tokens=4)
    desk.run(urgent)
    assert desk.offer(urgent, newcomer) == [urgent]
    assert desk.begun == []
    assert desk.answer.closed == EVERYWHERE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_released_job_leaves_nothing_behind(strategy: str) -> None:
    desk = Desk(6, strategy=strategy)
    jobs = jobs_of(30, 30, 30, max_tokens=2)
    desk.run(*jobs)
    for job in jobs:
        desk.manager.release(job, desk.now)
    assert desk.tiers.device.num_used == desk.tiers.host.num_used == 0
    assert desk.manager.num_away == 0
    again = make_job(9, 90, max_tokens=2)
    assert desk.offer(again) == [again]


# --- recompute --------------------------------------------------------------------------------


def test_the_least_urgent_holder_computes_again() -> None:
    desk = Desk(4, strategy="recompute")
    urgent, middle, least = jobs_of(32, 31, 31)
    desk.run(middle, least)
    assert desk.offer(urgent) == [urgent]
    assert (middle.num_computed, least.num_computed) == (31, 0)
    assert desk.held(middle, least) == [2, 0]
    assert desk.counters.recomputed_jobs == 1


def test_a_job_offered_later_can_lose_its_blocks_to_a_more_urgent_one() -> None:
    desk = Desk(3, strategy="recompute")
    urgent, least = jobs_of(48, 16)
    desk.run(least)
    assert desk.offer(urgent, least) == [urgent]
    assert least.num_computed == 0


def test_nothing_is_taken_for_a_job_that_would_not_fit_even_then() -> None:
    desk = Desk(6, strategy="recompute")
    urgent, newcomer, small = jobs_of(48, 64, 16)
    desk.run(small)
    assert desk.offer(urgent, newcomer, small) == [urgent]  # ``newcomer`` waits for its 4 blocks
    assert desk.held(urgent, newcomer, small) == [3, 0, 1]


def test_a_job_in_flight_keeps_its_blocks() -> None:
    desk = Desk(4, strategy="recompute")
    urgent, waiting, flying = jobs_of(32, 31, 31)
    desk.run(waiting, flying)
    assert desk.offer(urgent, in_flight=[flying]) == [urgent]
    assert desk.held(waiting, flying) == [0, 2]


def test_while_a_job_waits_for_blocks_in_flight_nobody_else_gets_new_ones() -> None:
    desk = Desk(5, strategy="recompute")
    urgent, decoding, newcomer, flying = jobs_of(64, 20, 1, 20)
    desk.run(decoding, flying)
    assert desk.offer(urgent, decoding, newcomer, in_flight=[flying]) == [decoding]
    assert desk.tiers.device.num_free == 1
    desk.manager.release(flying, desk.now)
    # The newcomer does not get the remaining block: ``decoding`` waits for two.
    assert desk.offer(urgent, decoding, newcomer) == [urgent]
    assert decoding.num_computed == 0


def test_a_round_in_which_a_job_was_dropped_is_exhausted_like_others() -> None:
    desk = Desk(4, strategy="recompute")
    urgent, newcomer, least = jobs_of(64, 16, 15)
    desk.run(least)
    assert desk.offer(urgent, newcomer) == [urgent]
    assert least.num_computed == 0
    assert desk.answer.closed == EVERYWHERE


# --- defer ------------------------------------------------------------------------------------


def test_a_new_job_waits_until_its_longest_kv_is_free() -> None:
    desk = Desk(6, strategy="defer")
    first, second, third = jobs_of(16, 16, 16, max_tokens=32)  # 3 blocks each in the end
    assert desk.offer(first, second, third) == [first, second]
    for _ in range(32):
        for job in (first, second):
            run_iteration(job)
        assert desk.offer(first, second, third) == [first, second]
    desk.manager.release(first, desk.now)
    assert desk.offer(second, third) == [second, third]
    assert desk.counters.recomputed_jobs == 0


def test_a_deferred_job_is_not_overtaken_by_new_ones() -> None:
    desk = Desk(6, strategy="defer")
    running, large, small = jobs_of(30, 60, 1, max_tokens=4)
    desk.run(running)
    assert desk.offer(running, large, small) == [running]
    assert desk.answer.closed == EVERYWHERE


# --- Whatever happens -------------------------------------------------------------------------


@pytest.mark.slow
@random_examples(200)
@given(
    data=st.data(),
    strategy=st.sampled_from(STRATEGIES),
    num_blocks=st.integers(4, 24),
    num_host_blocks=st.sampled_from([0, 2, 10, 100]),
    incremental=st.booleans(),
    write_back=st.booleans(),
)
def test_the_most_urgent_runs_at_last(
    data: st.DataObject,
    strategy: str,
    num_blocks: int,
    num_host_blocks: int,
    incremental: bool,
    write_back: bool,
) -> None:
    """In random rounds the first job of the offers runs after a bounded number of rounds."""
    desk = Desk(
        num_blocks,
        num_host_blocks,
        strategy=strategy,
        incremental=incremental,
        write_back=write_back,
        link=data.draw(st.sampled_from([FAST_LINK, Link(5.0, 5.0), SLOW_LINK])),
    )
    sizes = data.draw(st.lists(st.integers(1, 56), min_size=2, max_size=10))
    jobs = jobs_of(*sizes, max_tokens=8)
    for _ in range(data.draw(st.integers(1, 12))):
        offered = data.draw(st.permutations(jobs))
        for job in desk.offer(*offered):
            if len(job.output_ids) < 7:
                run_iteration(job)
        if data.draw(st.booleans()):
            desk.end_copies(succeeded=data.draw(st.sampled_from([True, True, False])))
    first = data.draw(st.sampled_from(jobs))
    others = [job for job in jobs if job is not first]
    desk.starving.add(first.number)  # else it waits until the jobs that began have ended
    for _ in range(4):
        if strategy == "defer":  # nobody loses blocks: the jobs before it have to end
            for job in others:
                desk.manager.release(job, desk.now)
        if first in desk.offer(first, *others):
            break
        desk.end_copies()
    else:
        raise AssertionError("the most urgent job waits for ever")
    for job in jobs:
        desk.manager.release(job, desk.now)
    desk.end_copies()
    assert desk.tiers.device.num_used == desk.tiers.host.num_used == 0
    assert TransferKind.SWAP_IN not in [transfer.kind for transfer in desk.tiers.transfers]


def test_a_job_whose_step_was_not_sent_is_offered_again() -> None:
    """Otherwise it would keep its blocks from all others, and no job would run."""
    desk = Desk(4, strategy="defer")
    urgent, taken = make_job(0, 40, max_tokens=8), make_job(1, 40, max_tokens=8)
    assert desk.offer(taken) == [taken]
    kv_round = desk.manager.start_round(5.0, ())
    batch = fill_batch(Listed([urgent, taken]), BatchLimits(8, 100), (), kv_round)
    assert batch == [(taken, 40)]
    _, closed = kv_round.offer(make_job(2, 40, max_tokens=8), 40)
    assert Place.NOWHERE in closed
