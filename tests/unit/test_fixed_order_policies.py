"""FCFS, fixed priority and SRPT: worked examples by hand, and what all policies have in common."""

from __future__ import annotations

import pytest
from fastserve_backend.job import Job, ServiceLevel
from fastserve_backend.scheduler.base import BatchLimits, Scheduled
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.fixed_priority import FixedPriority
from fastserve_backend.scheduler.sarathi_edf import SarathiEDF
from fastserve_backend.scheduler.srpt import SRPT
from fastserve_backend.scheduler.uniboost import UniBoost
from jobs import make_job
from policies import (
    POLICIES,
    TIMES,
    LinearTimes,
    by_priority,
    iterate,
    make_policy,
    one_job,
    select,
)

# --- Every policy -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_jobs_in_flight_are_not_selected(name: str) -> None:
    policy = make_policy(name, one_job())
    first, second = make_job(0, 1), make_job(1, 1)
    policy.add(first, 0.0)
    policy.add(second, 0.0)
    assert select(policy, 0.0) == [(first, 1)]
    assert select(policy, 0.0, [0]) == [(second, 1)]
    assert select(policy, 0.0, [0, 1]) == []


@pytest.mark.parametrize("name", POLICIES)
def test_a_removed_number_can_be_added_and_selected_again(name: str) -> None:
    policy = make_policy(name, one_job())
    job = make_job(0, 1)
    policy.add(job, 0.0)
    select(policy, 0.0)
    policy.remove(job)
    policy.add(job, 1.0)
    assert select(policy, 1.0) == [(job, 1)]


@pytest.mark.parametrize("name", POLICIES)
def test_recalibration_keeps_the_order(name: str) -> None:
    policy = make_policy(name, one_job())
    jobs: list[Job] = []
    for number, prompt_len in enumerate((5, 1, 3)):
        jobs.append(make_job(number, prompt_len))
        policy.add(jobs[-1], 0.0)
    order = by_priority(policy, jobs)
    policy.recalibrate()
    assert by_priority(policy, jobs) == order


# --- FCFS -------------------------------------------------------------------------------------


def test_fcfs_runs_to_completion_in_order_of_arrival() -> None:
    policy = FCFS(BatchLimits(max_seqs=2, max_tokens=100))
    jobs = [make_job(n, 3) for n in range(3)]
    for job in jobs:
        policy.add(job, 0.0)
    assert iterate(policy, 0.0) == jobs[:2]
    assert iterate(policy, 1.0) == jobs[:2]
    policy.remove(jobs[0])
    assert iterate(policy, 2.0) == [jobs[1], jobs[2]]
    assert by_priority(policy, jobs[1:]) == jobs[1:]
    assert policy.level_sizes() == (2,)


# --- Fixed priority ---------------------------------------------------------------------------


def test_fixed_priority_runs_the_shortest_prompt_at_every_token_whatever_its_output() -> None:
    policy = FixedPriority(one_job())
    short_prompt = make_job(0, 3, max_tokens=500)
    long_prompt = make_job(1, 4, max_tokens=1)
    policy.add(long_prompt, 0.0)
    assert iterate(policy, 0.0) == [long_prompt]
    policy.add(short_prompt, 1.0)
    for now in range(1, 20):
        assert iterate(policy, float(now)) == [short_prompt]


def test_fixed_priority_of_equal_prompts_is_by_arrival() -> None:
    policy = FixedPriority(BatchLimits(max_seqs=3, max_tokens=100))
    jobs = [make_job(n, 2) for n in range(4)]
    shortest = make_job(9, 1)
    for job in (*jobs, shortest):
        policy.add(job, 0.0)
    assert iterate(policy, 0.0) == [shortest, jobs[0], jobs[1]]
    assert iterate(policy, 1.0) == [shortest, jobs[0], jobs[1]]  # having run changes nothing
    assert by_priority(policy, [*jobs, shortest]) == [shortest, *jobs]


# --- SRPT -------------------------------------------------------------------------------------


def test_srpt_runs_the_job_with_the_least_work_left() -> None:
    policy = SRPT(one_job(), TIMES)
    long_prompt = make_job(0, 9, max_tokens=1)  # 9 s
    long_output = make_job(1, 1, max_tokens=10)  # 1 + 9 s
    middle = make_job(2, 4, max_tokens=6)  # 4 + 5 s: equal to the first, arrived later
    for job in (long_output, middle, long_prompt):
        policy.add(job, 0.0)
    jobs = [long_output, middle, long_prompt]
    assert by_priority(policy, jobs) == [long_prompt, middle, long_output]


def test_srpt_changes_its_order_as_jobs_progress() -> None:
    policy = SRPT(BatchLimits(max_seqs=1, max_tokens=100), TIMES)
    first, second = make_job(0, 6, max_tokens=4), make_job(1, 2, max_tokens=7)  # 9 s and 8 s
    policy.add(first, 0.0)
    assert iterate(policy, 0.0, elapsed_s=6.0) == [first]  # 3 s left
    policy.add(second, 6.0)
    assert by_priority(policy, [first, second]) == [first, second]
    newcomer = make_job(2, 1, max_tokens=2)  # 2 s
    policy.add(newcomer, 6.0)
    assert iterate(policy, 6.0) == [newcomer]
    policy.remove(newcomer)
    assert iterate(policy, 7.0) == [first]
    assert by_priority(policy, [first, second]) == [first, second]


def test_srpt_orders_all_jobs_by_the_times_that_hold_now() -> None:
    class DriftingTimes(LinearTimes):
        decode_token_s = 1.0

        def decode_s(self, context_tokens: int) -> float:
            return self.decode_token_s

    times = DriftingTimes()
    policy = SRPT(one_job(), times)
    runs, waits = make_job(0, 1, max_tokens=15), make_job(1, 1, max_tokens=20)
    for job in (runs, waits):
        policy.add(job, 0.0)
    DriftingTimes.decode_token_s = 3.0  # the rest of the first now takes 40 s, not 14
    policy.recalibrate()
    for now in range(3):
        assert iterate(policy, float(now)) == [runs]


def test_srpt_counts_the_chunks_that_have_run() -> None:
    policy = SRPT(BatchLimits(max_seqs=1, max_tokens=100, prefill_chunk_tokens=4), TIMES)
    chunked, other = make_job(0, 9, max_tokens=1), make_job(1, 6, max_tokens=2)  # 9 s, 6 + 1 s
    policy.add(chunked, 0.0)
    select(policy, 0.0)
    policy.add(other, 0.0)
    assert by_priority(policy, [chunked, other]) == [other, chunked]
    chunked.num_computed += 4
    policy.on_iteration_finished([Scheduled(chunked, 4)], 4.0)  # 5 s left
    assert by_priority(policy, [chunked, other]) == [chunked, other]


# --- Earliest deadline first ------------------------------------------------------------------


def test_the_job_whose_next_token_is_due_first_runs() -> None:
    policy = SarathiEDF(one_job(), first_token_s=10.0, token_s=2.0)
    first, second = make_job(0, 1), make_job(1, 1)
    policy.add(first, 0.0)  # due at 10, 12, 14, …
    policy.add(second, 3.0)  # due at 13, …
    ran = [iterate(policy, float(now))[0].number for now in range(3, 9)]
    assert ran == [0, 0, 1, 0, 1, 0]


def test_a_job_s_own_objectives_are_its_deadlines() -> None:
    policy = SarathiEDF(one_job(), first_token_s=10.0, token_s=2.0)
    plain, own = make_job(0, 1), make_job(1, 1)
    own.service = ServiceLevel(ttft_slo_s=4.0, tpot_slo_s=5.0)
    policy.add(plain, 0.0)  # due at 10, 12, 14, …
    policy.add(own, 0.0)  # due at 4, 9, 14, …
    ran = [iterate(policy, float(now))[0].number for now in range(6)]
    assert ran == [1, 1, 0, 0, 0, 1]


# --- UniBoost ---------------------------------------------------------------------------------


def test_a_short_job_overtakes_a_long_one_that_came_little_before_it() -> None:
    policy = UniBoost(one_job(), TIMES)
    long, short = make_job(0, 60), make_job(1, 1)
    policy.add(long, 0.0)
    policy.add(short, 50.0)
    assert by_priority(policy, [long, short]) == [short, long]
    late = make_job(2, 1)
    policy.add(late, 100.0)
    assert by_priority(policy, [long, late]) == [long, late]


def test_a_job_loses_its_head_start_as_it_runs() -> None:
    policy = UniBoost(one_job(), TIMES)
    older, newer = make_job(0, 1), make_job(1, 1)
    policy.add(older, 0.0)
    for now in range(30):
        assert iterate(policy, float(now)) == [older]
    policy.add(newer, 30.0)
    assert iterate(policy, 30.0) == [newer]
