"""A more urgent job takes KV memory from less urgent ones, and never the other way round."""

from __future__ import annotations

import pytest
from fastserve_backend.job import Job
from fastserve_backend.offers import OfferOutcome
from jobs import make_job
from kv_desk import Desk


def urgent_first(*jobs: tuple[int, int]) -> list[Job]:
    """Jobs of these (priority, prompt tokens), the most urgent first, as ``Desk`` orders them."""
    return [
        make_job(number, prompt_len, priority=priority)
        for number, (priority, prompt_len) in enumerate(jobs)
    ]


@pytest.mark.parametrize(("priority", "starts"), [(-1, True), (0, False)])
@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_only_less_urgent_jobs_compute_again_for_a_new_job(
    priority: int, starts: bool, num_host_blocks: int
) -> None:
    """The host has room for one of the two jobs that have to leave, at most."""
    desk = Desk(4, num_host_blocks)
    new, *begun = urgent_first((priority, 64), (0, 31), (0, 31))
    desk.starving |= {job.number for job in begun}  # so that both begin
    desk.run(*begun)
    taken = desk.offer(new, *begun)
    if starts:
        while not taken:  # blocks of the job that is swapped out become free
            desk.end_copies()
            taken = desk.offer(new, *begun)
        assert taken == [new]
        assert desk.counters.recomputed_jobs == (2 if num_host_blocks == 0 else 1)
    else:
        assert taken == begun
        assert desk.counters.recomputed_jobs == 0


def test_jobs_of_the_same_priority_are_swapped_and_less_urgent_ones_compute_again() -> None:
    """All three have to leave, and the host has room for one."""
    desk = Desk(6, 2)
    new, same, *less = urgent_first((0, 96), (0, 31), (1, 31), (1, 31))
    desk.starving |= {job.number for job in (new, same, *less)}
    desk.run(same, *less)
    assert desk.offer(new, same, *less) == []
    assert desk.kinds() == [(same.number, "swap_out")]
    assert desk.counters.recomputed_jobs == 2
    desk.end_copies()
    assert desk.offer(new, same, *less) == [new]


def test_room_to_grow_is_kept_for_jobs_of_the_same_priority_only() -> None:
    for priority, starts in ((0, False), (1, True)):
        desk = Desk(7, 0)
        new, begun = urgent_first((0, 17), (priority, 17))
        desk.run(begun)  # 2 blocks, and 4 to grow by
        assert desk.offer(new, begun) == ([new, begun] if starts else [begun])


@pytest.mark.parametrize("strategy", ["recompute", "proactive"])
def test_a_less_urgent_job_takes_nothing_from_a_more_urgent_one(strategy: str) -> None:
    """The urgent job is not offered: it waits for tokens of the iteration, or for its mask."""
    for priority in (0, 1):
        desk = Desk(3, strategy=strategy)
        urgent, job = urgent_first((0, 31), (priority, 16))
        desk.run(urgent)
        desk.run(job)
        taken = desk.offer(job)  # needs a second block
        if priority == 0:
            swaps = strategy == "proactive"
            assert taken == ([] if swaps else [job])
            assert desk.kinds() == ([(urgent.number, "swap_out")] if swaps else [])
        else:
            assert (taken, desk.begun) == ([], [])
            assert desk.answer.outcome is OfferOutcome.NO_ROOM
            assert desk.held(urgent) == [2]


def test_a_job_that_outranks_all_takes_memory_of_more_urgent_ones() -> None:
    desk = Desk(3, strategy="recompute")
    urgent, job = urgent_first((0, 31), (1, 16))
    desk.run(urgent)
    desk.run(job)
    job.outranks_all = True
    assert desk.offer(job, urgent) == [job]


def on_host(desk: Desk, *jobs: Job) -> None:
    """The jobs run and are swapped out, one after the other, and all for an even more urgent
    job."""
    most_urgent = make_job(100, 16 * desk.tiers.device.num_blocks, priority=-9)
    for job in jobs:
        desk.run(job)
        desk.offer(most_urgent)
        desk.end_copies()
        assert desk.tiers.is_swapped_out(job.number)
        desk.known.pop(most_urgent.number)
        desk.start_round()


def test_the_least_urgent_jobs_on_a_full_host_compute_again_for_more_urgent_ones() -> None:
    desk = Desk(4, 4)
    new, job, *less = urgent_first((-1, 64), (0, 31), (1, 31), (2, 31))
    on_host(desk, *less)
    assert desk.tiers.host.num_free == 0
    desk.run(job)
    assert desk.offer(new, job, *less) == []
    assert desk.kinds() == [(job.number, "swap_out")]
    assert [one.num_computed > 0 for one in less] == [True, False]
    assert desk.counters.recomputed_jobs == 1


def test_on_a_full_host_a_job_takes_no_room_from_jobs_as_urgent_as_itself() -> None:
    desk = Desk(4, 4)
    new, *others, job = urgent_first((-1, 64), (0, 31), (1, 31), (1, 31))
    on_host(desk, *others)
    desk.run(job)
    assert desk.offer(new, *others, job) == [new]
    assert all(one.num_computed > 0 for one in others)
    assert job.num_computed == 0


def test_a_new_job_starts_if_less_urgent_jobs_on_the_host_make_room() -> None:
    desk = Desk(4, 4)
    new, job, *less = urgent_first((0, 64), (0, 31), (1, 31), (2, 31))
    on_host(desk, *less)
    desk.run(job)
    desk.offer(new, job, *less)
    assert desk.kinds() == [(job.number, "swap_out")]
    assert job.num_computed > 0


def test_looking_ahead_drops_no_kv() -> None:
    """Blocks are kept free for arrivals, and the host is full of less urgent KV."""
    desk = Desk(4, 4)
    job, *less = urgent_first((0, 63), (1, 31), (2, 31))
    on_host(desk, *less)
    desk.run(job)
    desk.manager.on_arrival(make_job(50, 16), desk.now)
    desk.offer(*less)
    assert desk.begun == []
    assert all(one.num_computed > 0 for one in less)
