"""Which jobs leave for the host when blocks are short, and which return: reactive and proactive."""

from __future__ import annotations

import logging

import pytest
from fastserve_backend.job import Job
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.rank_protocol.link import Link
from jobs import make_job, run_iteration
from kv_desk import FAST_LINK, SLOW_LINK, Desk, jobs_of
from policies import LinearTimes

# --- On demand --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["reactive", "proactive"])
def test_the_last_to_run_is_swapped_out_and_back(strategy: str) -> None:
    desk = Desk(4, strategy=strategy)
    urgent, middle, least = jobs_of(32, 31, 31)
    desk.run(middle, least)
    assert desk.offer(urgent) == []  # its blocks are on their way to the host
    assert desk.kinds() == [(2, "swap_out")]
    assert (desk.manager.num_away, least.num_computed, least.num_swaps) == (1, 31, 1)
    assert desk.offer(urgent) == []  # and it takes no more blocks meanwhile
    assert desk.begun == []
    desk.end_copies()
    assert desk.offer(urgent, middle) == [urgent, middle]
    run_iteration(urgent)
    desk.manager.release(urgent, desk.now)
    desk.manager.release(middle, desk.now)
    assert desk.offer(least) == []
    assert desk.kinds() == [(2, "swap_in")]
    desk.end_copies()
    assert desk.offer(least) == [least]
    assert (least.num_computed, desk.counters.recomputed_jobs) == (31, 0)
    assert (desk.counters.swap_out_bytes, desk.counters.swap_in_bytes) == (200, 200)


@pytest.mark.parametrize(
    ("strategy", "block_s", "waits"),
    # An iteration takes 1 s at least. Two jobs would wait for two blocks, and one without them.
    [("reactive", 1.0, True), ("proactive", 0.3, False), ("proactive", 0.2, True)],
)
def test_steps_wait_for_copies_if_that_costs_less(
    strategy: str, block_s: float, waits: bool
) -> None:
    desk = Desk(6, strategy=strategy, link=Link(block_s, block_s))
    urgent, *running, least = jobs_of(32, 30, 30, 30)
    desk.run(*running, least)
    assert desk.offer(*running, urgent) == running
    assert desk.kinds() == [(3, "swap_out")]
    assert desk.manager.holds_steps is waits
    desk.end_copies()
    assert not desk.manager.holds_steps


def test_without_room_on_the_host_a_job_computes_again() -> None:
    for num_host_blocks in (0, 1):
        desk = Desk(4, num_host_blocks)
        urgent, least = jobs_of(48, 31)
        desk.run(least)
        assert desk.offer(urgent, least) == [least]  # no copy begins for that
        assert least.num_computed == 31
        desk.starving.add(urgent.number)
        assert desk.offer(urgent) == [urgent]
        assert (least.num_computed, desk.counters.recomputed_jobs) == (0, 1)
        assert desk.begun == []


def test_a_job_too_large_for_the_host_takes_no_room_from_smaller_ones() -> None:
    desk = Desk(8, 3, strategy="reactive")
    urgent, *others = jobs_of(128, 16, 32, 64)
    desk.run(*others)
    desk.offer(urgent)
    assert desk.kinds() == [(2, "swap_out"), (1, "swap_out")]
    assert desk.counters.recomputed_jobs == 1
    desk.end_copies()
    assert desk.offer(urgent) == [urgent]


def test_copies_of_jobs_on_the_device_make_room_on_the_host() -> None:
    desk = Desk(6, 3)
    first, second, urgent = make_job(1, 31), make_job(2, 31), make_job(0, 64)
    desk.run(first, second)
    desk.starving.add(0)
    desk.offer(make_job(0, 48))  # 2 free blocks and those of ``second``
    desk.end_copies()
    assert desk.manager.num_away == 1
    desk.offer(second)
    desk.end_copies()
    assert desk.tiers.num_saved(2) == 31
    desk.offer(second, urgent)  # ``first`` has to go: the host forgets ``second``
    assert desk.kinds() == [(1, "swap_out")]
    assert desk.tiers.num_saved(2) == 0
    assert desk.counters.recomputed_jobs == 0


def test_a_swap_counts_what_the_host_had_already() -> None:
    desk = Desk(4)
    urgent, job = make_job(0, 64), make_job(1, 40)
    desk.run(job)
    desk.offer(urgent)
    desk.end_copies()
    desk.offer(job)
    desk.end_copies()
    assert desk.offer(job) == [job]
    run_iteration(job)
    assert desk.offer(urgent) == []
    # 41 tokens: two full blocks are there, the third is copied again.
    assert [len(transfer.device_blocks) for transfer in desk.begun] == [1]
    assert desk.counters.swap_avoided_bytes == 200


def test_a_job_is_swapped_or_computed_again_by_cost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    desk = Desk(4, link=SLOW_LINK)
    urgent, least = jobs_of(64, 31)
    desk.run(least)
    desk.starving.add(urgent.number)
    assert desk.offer(urgent) == [urgent]
    assert least.num_computed == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert "job job-1 leaves the device: swapping 2 blocks delays jobs by 4000000.00 ms" in message
    assert "computing 31 tokens again by 31000.00 ms: recompute" in message


def test_computing_again_delays_all_that_run_and_a_copy_one_job() -> None:
    costs = SwapCosts(LinearTimes(), 100, Link(10.0, 10.0))
    job = make_job(0, 30, computed=True)  # 30 s of prefill
    assert not costs.swap_is_cheaper(
        job, num_lost=job.num_computed, blocks_out=2, blocks_in=2, num_running=0
    )  # 40 s
    assert costs.swap_is_cheaper(
        job, num_lost=job.num_computed, blocks_out=2, blocks_in=2, num_running=1
    )


def test_a_new_job_leaves_room_to_grow_where_nobody_can_be_swapped() -> None:
    begun, new = jobs_of(17, 17)
    for num_blocks, num_host_blocks, taken in ((8, 0, True), (7, 0, False), (7, 4, True)):
        desk = Desk(num_blocks, num_host_blocks)
        begun.num_computed = 0
        desk.run(begun)  # 2 blocks, and 4 to grow by
        assert desk.offer(begun, new) == ([begun, new] if taken else [begun])


def test_a_new_job_leaves_alone_those_that_would_compute_again() -> None:
    """The host already holds one of the two jobs that would have to leave."""
    desk = Desk(4, 2)
    urgent, *begun = jobs_of(64, 31, 31)
    desk.starving |= {job.number for job in begun}
    desk.run(*begun)
    assert desk.offer(urgent, *begun) == begun
    assert (desk.begun, desk.counters.recomputed_jobs) == ([], 0)


def test_the_speed_of_the_link_is_learnt() -> None:
    costs = SwapCosts(LinearTimes(), 100, Link(10.0, 10.0))
    job = make_job(0, 30, computed=True)
    assert not costs.swap_is_cheaper(
        job, num_lost=job.num_computed, blocks_out=2, blocks_in=2, num_running=0
    )
    for _ in range(150):
        costs.link.observe(True, 10, 0.01)
        costs.link.observe(False, 10, 0.02)
    assert costs.link.transfer_s(True, 1) == pytest.approx(0.001, rel=0.1)
    assert costs.link.transfer_s(False, 5) == pytest.approx(0.01, rel=0.1)
    assert costs.swap_is_cheaper(
        job, num_lost=job.num_computed, blocks_out=2, blocks_in=2, num_running=0
    )


def leaving() -> tuple[Desk, Job, Job]:
    """A manager of four blocks, an urgent job that needs three, and the job that leaves for it."""
    desk = Desk(4)
    urgent, least = jobs_of(48, 31)
    desk.run(least)
    assert desk.offer(urgent) == []
    return desk, urgent, least


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failed_copy_costs_one_job_its_kv(direction: str) -> None:
    desk, urgent, least = leaving()
    if direction == "in":
        desk.end_copies()
        desk.offer(least)
    desk.end_copies(succeeded=False)
    assert (least.num_computed, desk.counters.recomputed_jobs) == (0, 1)
    assert desk.tiers.device.num_used == desk.tiers.host.num_used == 0
    assert desk.offer(urgent) == [urgent]


def test_a_job_that_ends_during_its_copy_is_forgotten_after_it() -> None:
    desk, urgent, least = leaving()
    desk.manager.release(least, desk.now)
    assert desk.offer(urgent) == []
    desk.end_copies()
    assert desk.tiers.device.num_used == desk.tiers.host.num_used == 0
    assert desk.offer(urgent) == [urgent]
    assert desk.counters.recomputed_jobs == 0


def test_time_in_which_a_job_waits_for_its_kv_is_counted() -> None:
    desk, urgent, least = leaving()
    desk.offer(urgent)
    desk.end_copies()
    desk.run(urgent)
    assert (urgent.swap_stall_s, least.swap_stall_s) == (2.0, 0.0)


def test_jobs_for_whom_no_room_is_coming_do_not_make_others_wait() -> None:
    desk = Desk(60, link=Link(0.2, 0.2))
    waiting = [make_job(10 + n, 30) for n in range(20)]
    desk.run(*waiting)
    blocker = make_job(-1, 960)
    assert desk.offer(blocker) == []
    desk.end_copies()
    desk.run(blocker)
    desk.manager.release(blocker, desk.now)
    running, least = [make_job(n, 200) for n in range(4)], make_job(99, 120)
    desk.run(*running, least)
    # Eight blocks leave: four for the urgent job, and two for each of two jobs.
    urgent = make_job(-2, 64)
    for _ in range(2):
        assert desk.offer(*running, urgent, *waiting) == running
        assert not desk.manager.holds_steps
    assert [job for job in waiting if job.swap_stall_s] == waiting[:2]


def test_nobody_waits_for_copies_when_nobody_runs() -> None:
    desk, _, _ = leaving()
    assert desk.begun
    assert not desk.manager.holds_steps


def test_one_stuck_copy_does_not_end_swapping() -> None:
    costs = SwapCosts(LinearTimes(), 100, FAST_LINK)
    for _ in range(10):
        costs.link.observe(False, 1, 100.0)
    job = make_job(0, 1, computed=True)
    for _ in range(100):
        assert not costs.swap_is_cheaper(
            job, num_lost=job.num_computed, blocks_out=0, blocks_in=10**9, num_running=0
        )
    assert costs.link.transfer_s(False, 1) == pytest.approx(FAST_LINK.block_in_s, rel=0.1)


# --- Ahead of time: proactive -----------------------------------------------------------------


def arrive(desk: Desk, *sizes: int) -> None:
    """Repeats arrivals, so that blocks are kept free for them."""
    for number, size in enumerate(sizes):
        desk.manager.on_arrival(make_job(1000 + number, size), desk.now)


def test_blocks_are_kept_free_for_arrivals() -> None:
    desk = Desk(16)
    arrive(desk, 16, 32)
    jobs = jobs_of(63, 63, 63, 63)
    desk.run(*jobs)
    desk.offer_until_copies_begin(*jobs[:2])
    assert desk.kinds() == [(3, "swap_out")]  # the last to run, although nobody needs it yet
    desk.offer_until_copies_begin(*jobs[:2])
    assert desk.begun == []  # 4 blocks are coming, the reserve is 3


def test_jobs_that_step_in_the_reserve_are_not_stopped() -> None:
    desk = Desk(16)
    arrive(desk, 64)
    jobs = jobs_of(63, 63, 63, 63)
    desk.run(*jobs)
    desk.offer_until_copies_begin(*jobs)
    assert desk.begun == []  # all run


def test_the_next_to_run_returns_before_it_is_offered() -> None:
    desk = Desk(16)
    jobs = jobs_of(63, 63, 63, 63, 63)
    desk.run(*jobs[1:])
    desk.offer(jobs[0], *jobs[1:3])
    assert desk.kinds() == [(4, "swap_out")]
    desk.end_copies()
    desk.run(jobs[0])
    desk.manager.release(jobs[0], desk.now)
    desk.manager.release(jobs[1], desk.now)
    desk.offer(jobs[2])
    assert desk.kinds() == [(4, "swap_in")]
    desk.end_copies()
    assert desk.offer(jobs[4]) == [jobs[4]]


def test_a_job_at_the_border_does_not_leave_and_return() -> None:
    # 40 blocks hold ten jobs of 4 blocks. Jobs return to fill nine tenths of them.
    desk = Desk(40)
    jobs = jobs_of(*[60] * 11)
    desk.run(*jobs[1:])
    desk.offer(jobs[0])
    assert desk.kinds() == [(10, "swap_out")]
    desk.end_copies()
    desk.run(jobs[0])
    desk.manager.release(jobs[0], desk.now)
    # There is room for the last one, but it would be the next to leave.
    desk.offer_until_copies_begin(*jobs[1:3])
    assert desk.begun == []
    desk.manager.release(jobs[1], desk.now)
    desk.offer(*jobs[2:4])
    assert desk.kinds() == [(10, "swap_in")]


def test_a_job_that_runs_later_leaves_for_one_that_runs_earlier() -> None:
    desk = Desk(40)
    early, *late = jobs_of(*[60] * 11)
    desk.run(early)
    desk.run(*late[:9])
    blocker = make_job(-1, 60)
    # All others are in flight, so the early job is the only one that can leave.
    assert desk.offer(blocker, in_flight=late[:9]) == []
    assert desk.kinds() == [(0, "swap_out")]
    desk.end_copies()
    desk.run(blocker)
    assert desk.kinds() == [(9, "swap_out")]
    desk.end_copies()
    desk.offer(blocker)
    assert desk.kinds() == [(0, "swap_in")]


def test_at_most_two_jobs_return_at_once() -> None:
    desk = Desk(40)
    jobs = jobs_of(*[60] * 10)
    desk.run(*jobs)
    whole = make_job(-1, 640)
    desk.offer(whole)
    desk.end_copies()
    desk.run(whole)
    desk.manager.release(whole, desk.now)
    desk.offer()
    assert desk.kinds() == [(0, "swap_in"), (1, "swap_in")]
    desk.offer()
    assert desk.begun == []
    desk.end_copies()
    desk.offer()
    assert desk.kinds() == [(2, "swap_in"), (3, "swap_in")]


def test_idle_link_time_copies_full_blocks_of_the_last_to_run() -> None:
    desk = Desk(8, write_back=True, link=Link(0.002, 0.002))
    first, last = jobs_of(60, 60)
    desk.run(first, last)
    desk.offer_until_copies_begin(first)
    assert desk.kinds() == [(1, "write_back")]
    assert len(desk.begun[0].device_blocks) == 2  # 5 ms of the link
    assert desk.offer(first, last) == [first, last]  # it may run meanwhile
    desk.end_copies()
    desk.offer(first)
    desk.end_copies()
    desk.offer(make_job(-1, 60), first)
    assert desk.kinds()[0] == (1, "swap_out")
    assert len(desk.begun[0].device_blocks) == 1  # the block that was not full
    assert desk.counters.swap_avoided_bytes == 300


def test_write_backs_leave_room_on_the_host() -> None:
    desk = Desk(8, 4, write_back=True)
    first, last = jobs_of(60, 60)
    desk.run(first, last)
    desk.offer_until_copies_begin(first)
    desk.end_copies()
    desk.offer_until_copies_begin(first)
    assert desk.begun == []
    assert desk.tiers.host.num_free == 1
