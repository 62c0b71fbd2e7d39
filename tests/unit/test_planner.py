"""Who gets blocks when there are too few."""

from __future__ import annotations

from fastserve_backend.job import Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.planner import plan
from fastserve_backend.scheduler.base import Scheduled
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job


def whole(*jobs: Job) -> list[Scheduled]:
    """Each job with all its uncomputed tokens."""
    return [Scheduled(job, job.num_uncomputed) for job in jobs]


def test_all_fit() -> None:
    pool = BlockPool(10, 16)
    jobs = [make_job(n, 30) for n in range(3)]
    result = plan(whole(*jobs), reversed(jobs), pool)
    assert result.scheduled == whole(*jobs)
    assert result.dropped == []
    assert pool.num_used == 6


def test_the_least_urgent_holder_loses_its_blocks() -> None:
    pool = BlockPool(4, 16)
    urgent, middle, least = (make_job(n, 32, computed=n > 0) for n in range(3))
    pool.grow(middle.number, 32)
    pool.grow(least.number, 32)
    result = plan(whole(urgent), [least, middle, urgent], pool)
    assert result.scheduled == whole(urgent)
    assert result.dropped == [least]
    assert pool.num_held(middle.number) == 2


def test_a_job_takes_nothing_from_a_more_urgent_one() -> None:
    pool = BlockPool(4, 16)
    urgent, newcomer = make_job(0, 60, computed=True), make_job(1, 16)
    pool.grow(urgent.number, 60)
    result = plan(whole(urgent, newcomer), [newcomer, urgent], pool)
    assert result.scheduled == whole(urgent)
    assert result.dropped == []


def test_nothing_is_dropped_for_a_job_that_would_not_fit_even_then() -> None:
    pool = BlockPool(6, 16)
    urgent, newcomer, small = make_job(0, 48), make_job(1, 64), make_job(2, 16, computed=True)
    pool.grow(small.number, 17)
    result = plan(whole(urgent, newcomer, small), [small, newcomer, urgent], pool)
    assert result.scheduled == whole(urgent, small)
    assert result.dropped == []


def test_a_selected_job_can_lose_its_blocks_to_a_more_urgent_one() -> None:
    pool = BlockPool(3, 16)
    urgent, least = make_job(0, 48), make_job(1, 16, computed=True)
    pool.grow(least.number, 17)
    result = plan(whole(urgent, least), [least, urgent], pool)
    assert result.scheduled == whole(urgent)
    assert result.dropped == [least]


def test_a_chunk_takes_blocks_for_its_own_tokens_only() -> None:
    pool = BlockPool(10, 16)
    job = make_job(0, 100)
    assert plan([(job, 20)], [job], pool).scheduled == [(job, 20)]
    assert pool.num_held(0) == 2
    job.num_computed = 20
    plan([(job, 12)], [job], pool)
    assert pool.num_held(0) == 2  # 32 tokens: exactly full
    job.num_computed = 32
    plan([(job, 68)], [job], pool)
    assert pool.num_held(0) == 7


def test_a_job_in_flight_keeps_its_blocks() -> None:
    pool = BlockPool(4, 16)
    urgent, flying, waiting = make_job(0, 32), *(make_job(n, 32, computed=True) for n in (1, 2))
    for holder in (flying, waiting):
        pool.grow(holder.number, 32)
    result = plan(whole(urgent), [flying, waiting, urgent], pool, in_flight={1})
    assert result.dropped == [waiting]  # although ``flying`` is less urgent
    assert result.scheduled == whole(urgent)


def test_while_a_job_waits_for_blocks_in_flight_nobody_else_gets_new_ones() -> None:
    pool = BlockPool(5, 16)
    urgent, flying, decoding = make_job(0, 64), *(make_job(n, 20, computed=True) for n in (1, 2))
    for holder in (flying, decoding):
        pool.grow(holder.number, 21)
    newcomer = make_job(3, 1)
    ranking = [newcomer, flying, decoding, urgent]
    result = plan(whole(urgent, decoding, newcomer), ranking, pool, in_flight={1})
    assert result.scheduled == whole(decoding)  # it needs no block
    assert result.dropped == []
    assert pool.num_free == 1
    pool.release(flying.number)
    result = plan(whole(urgent, decoding, newcomer), ranking, pool)
    assert result.scheduled == whole(urgent, newcomer)
    assert result.dropped == [decoding]


@settings(max_examples=300, deadline=None)
@given(
    num_blocks=st.integers(4, 24),
    sizes=st.lists(
        st.tuples(st.integers(1, 64), st.sampled_from(["new", "holds", "flies"])),
        min_size=1,
        max_size=12,
    ),
    selected_mask=st.lists(st.booleans(), min_size=12, max_size=12),
    chunk=st.none() | st.integers(1, 40),
)
def test_the_most_urgent_runs_unless_those_in_flight_hold_its_blocks(
    num_blocks: int,
    sizes: list[tuple[int, str]],
    selected_mask: list[bool],
    chunk: int | None,
) -> None:
    pool = BlockPool(num_blocks, 16)
    jobs = [make_job(n, size) for n, (size, _) in enumerate(sizes)]
    in_flight = set()
    for job, (_, state) in zip(jobs, sizes, strict=True):
        if state != "new" and pool.missing(job.number, job.num_tokens) <= pool.num_free:
            pool.grow(job.number, job.num_tokens)
            job.num_computed = job.num_tokens - 1
            if state == "flies":
                in_flight.add(job.number)
    held_before = {job.number: pool.num_held(job.number) for job in jobs}
    waiting = [job for job in jobs if job.number not in in_flight]
    # A policy's batch begins with the most urgent of the waiting jobs.
    chosen = waiting[:1] + [job for job in waiting[1:] if selected_mask[job.number]]
    selected = [
        Scheduled(job, min(job.num_uncomputed, chunk or job.num_uncomputed)) for job in chosen
    ]
    result = plan(selected, reversed(jobs), pool, in_flight)
    pool.check_integrity()
    if selected:
        job, num_tokens = selected[0]
        flying_blocks = sum(held_before[number] for number in in_flight)
        fits = pool.blocks_for(job.num_computed + num_tokens) <= num_blocks - flying_blocks
        assert (result.scheduled[:1] == selected[:1]) == fits
    dropped = {job.number for job in result.dropped}
    assert len(dropped) == len(result.dropped)
    assert all(held_before[number] > 0 for number in dropped)
    assert not dropped & in_flight
    assert not dropped & {job.number for job, _ in result.scheduled}
    assert [item for item in selected if item in result.scheduled] == result.scheduled
    for job, num_tokens in result.scheduled:
        assert pool.missing(job.number, job.num_computed + num_tokens) == 0
    for number in in_flight:
        assert pool.num_held(number) == held_before[number]
    for number in dropped:
        assert pool.num_held(number) == 0
        # Only a more urgent (earlier) job's need can have taken them.
        assert any(job.number < number for job, _ in result.scheduled)
