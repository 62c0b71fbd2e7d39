"""Who gets blocks when there are too few."""

from __future__ import annotations

from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.planner import plan
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job


def test_all_fit() -> None:
    pool = BlockPool(10, 16)
    jobs = [make_job(n, 30) for n in range(3)]
    result = plan(jobs, reversed(jobs), pool)
    assert result.scheduled == jobs
    assert result.dropped == []
    assert pool.num_used == 6


def test_the_least_urgent_holder_loses_its_blocks() -> None:
    pool = BlockPool(4, 16)
    urgent, middle, least = (make_job(n, 32, computed=n > 0) for n in range(3))
    pool.grow(middle.number, 32)
    pool.grow(least.number, 32)
    result = plan([urgent], [least, middle, urgent], pool)
    assert result.scheduled == [urgent]
    assert result.dropped == [least]
    assert pool.num_held(middle.number) == 2


def test_a_job_takes_nothing_from_a_more_urgent_one() -> None:
    pool = BlockPool(4, 16)
    urgent, newcomer = make_job(0, 60, computed=True), make_job(1, 16)
    pool.grow(urgent.number, 60)
    result = plan([urgent, newcomer], [newcomer, urgent], pool)
    assert result.scheduled == [urgent]
    assert result.dropped == []


def test_nothing_is_dropped_for_a_job_that_would_not_fit_even_then() -> None:
    pool = BlockPool(6, 16)
    urgent, newcomer, small = make_job(0, 48), make_job(1, 64), make_job(2, 16, computed=True)
    pool.grow(small.number, 17)
    result = plan([urgent, newcomer, small], [small, newcomer, urgent], pool)
    assert result.scheduled == [urgent, small]
    assert result.dropped == []


def test_a_selected_job_can_lose_its_blocks_to_a_more_urgent_one() -> None:
    pool = BlockPool(3, 16)
    urgent, least = make_job(0, 48), make_job(1, 16, computed=True)
    pool.grow(least.number, 17)
    result = plan([urgent, least], [least, urgent], pool)
    assert result.scheduled == [urgent]
    assert result.dropped == [least]


@settings(max_examples=300, deadline=None)
@given(
    num_blocks=st.integers(4, 24),
    sizes=st.lists(st.tuples(st.integers(1, 64), st.booleans()), min_size=1, max_size=12),
    selected_mask=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_the_most_urgent_always_runs_and_holders_are_consistent(
    num_blocks: int, sizes: list[tuple[int, bool]], selected_mask: list[bool]
) -> None:
    pool = BlockPool(num_blocks, 16)
    jobs = [make_job(n, size) for n, (size, _) in enumerate(sizes)]
    for job, (_, holds) in zip(jobs, sizes, strict=True):
        if holds and pool.missing(job.number, job.num_tokens) <= pool.num_free:
            pool.grow(job.number, job.num_tokens)
            job.num_computed = job.num_tokens - 1
    held_before = {job.number for job in jobs if pool.num_held(job.number)}
    others = [job for job, mask in zip(jobs[1:], selected_mask, strict=False) if mask]
    selected = [jobs[0], *others]  # a policy's batch begins with the most urgent job of all
    result = plan(selected, reversed(jobs), pool)
    pool.check_integrity()
    assert result.scheduled[0] is selected[0]
    dropped = {job.number for job in result.dropped}
    assert dropped <= held_before
    assert not dropped & {job.number for job in result.scheduled}
    for job in result.scheduled:
        assert pool.missing(job.number, job.num_tokens) == 0
    for number in dropped:
        assert pool.num_held(number) == 0
        # Only a more urgent (earlier) job's need can have taken them.
        assert any(job.number < number for job in result.scheduled)
