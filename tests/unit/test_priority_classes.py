"""Strict priorities over any policy, and the bound on waiting across them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.job import FinishReason, Job, Place
from fastserve_backend.scheduler.base import BatchLimits, Policy
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.policy_context import make_policy
from fastserve_backend.scheduler.priority_classes import PriorityClasses
from fastserve_backend.scheduler.promotion import Promotion
from jobs import make_job, run_iteration
from policies import POLICIES, TIMES, iterate, mlfq, select, speculative
from policies import make_policy as make_inner

STARVATION_S = 10.0


def classes(max_seqs: int = 1, *, across: bool = False) -> PriorityClasses:
    limits = BatchLimits(max_seqs, 1000)
    promotion = Promotion(STARVATION_S, lambda job: 0.0) if across else None
    return PriorityClasses(lambda: FCFS(limits), promotion)


def add(policy: Policy, *priorities: int, prompt_len: int = 1) -> list[Job]:
    """Jobs 0, 1, … with these priorities, which arrive at 0 s."""
    jobs = [make_job(n, prompt_len, priority=priority) for n, priority in enumerate(priorities)]
    for job in jobs:
        policy.add(job, 0.0)
    return jobs


def numbers(jobs: Sequence[Job]) -> list[int]:
    return [job.number for job in jobs]


def walked(policy: Policy) -> list[int]:
    return numbers(list(policy.walk(0.0, ())))


@pytest.mark.parametrize("name", POLICIES)
def test_lower_priorities_run_first_under_any_policy(name: str) -> None:
    policy = PriorityClasses(lambda: make_inner(name, BatchLimits(2, 1000)))
    late, default, urgent, last = add(policy, 5, 0, -3, 5)
    assert numbers(iterate(policy, 0.0)) == [urgent.number, default.number]
    policy.remove(urgent)
    assert numbers(iterate(policy, 1.0)) == [default.number, late.number]
    policy.remove(default)
    assert set(numbers(iterate(policy, 2.0))) == {late.number, last.number}


def test_a_more_urgent_job_takes_the_seat_at_the_next_token() -> None:
    policy = classes()
    add(policy, 0)
    assert numbers(iterate(policy, 0.0)) == [0]
    policy.add(make_job(1, 5, priority=-1), 0.5)
    assert numbers(iterate(policy, 1.0)) == [1]


def test_a_walk_skips_places_of_all_priorities() -> None:
    policy = classes()
    jobs = add(policy, 1, 0, 1, 0)
    for job in jobs[2:]:
        job.place = Place.HOST
        policy.on_place_changed(job)
    walk = policy.walk(0.0, ())
    assert next(walk).number == 1
    walk.skip(Place.HOST)
    assert numbers(list(walk)) == [0]


@pytest.mark.parametrize("name", POLICIES)
def test_priority_counts_before_the_estimate_of_the_policy(name: str) -> None:
    policy = PriorityClasses(lambda: make_inner(name, BatchLimits(1, 1000)))
    jobs = add(policy, 1, 0, 2, -1, 0)
    estimate = policy.next_run_estimate(0.0)
    by_estimate = sorted(jobs, key=estimate)
    assert [job.service.priority for job in by_estimate] == [-1, 0, 0, 1, 2]
    for last_first in (False, True):
        found = list(policy.by_next_run(Place.NOWHERE, estimate, last_first=last_first))
        assert found == (by_estimate[::-1] if last_first else by_estimate)


def test_with_one_priority_the_estimates_are_those_of_its_policy() -> None:
    policy = classes()
    (job,) = add(policy, 7)
    assert policy.next_run_estimate(0.0)(job) == (0, 0)
    assert list(policy.by_next_run(job.place, policy.next_run_estimate(0.0), last_first=True)) == [
        job
    ]


def test_counts_of_a_dropped_policy_stay() -> None:
    policy = PriorityClasses(mlfq)
    urgent, default = add(policy, -1, 0)
    for now in range(3):
        iterate(policy, float(now))
    assert policy.num_demotions == 2
    policy.remove(urgent)
    assert policy.num_demotions == 2
    assert sum(policy.level_sizes()) == 1
    policy.remove(default)
    assert sum(policy.level_sizes()) == 0
    assert iterate(policy, 9.0) == []


def test_levels_of_all_priorities_are_added_up() -> None:
    policy = PriorityClasses(mlfq)
    add(policy, -1, 0, 0, 3)
    iterate(policy, 0.0)
    iterate(policy, 1.0)
    assert len(policy.level_sizes()) == len(policy.quanta_s)
    assert policy.level_sizes()[:3] == [3, 1, 0]


def test_what_is_learned_about_lengths_counts_for_all_priorities() -> None:
    config = EngineConfig().with_keys(policy="gittins", max_num_seqs=1).scheduler
    policy = make_policy(config, TIMES, max_model_len=100, kv_tokens=10_000)

    def index_of_new_job(number: int) -> float:
        job = make_job(number, 1, max_tokens=100, priority=3)
        policy.add(job, 0.0)
        key = policy.next_run_estimate(0.0)(job)[0]
        policy.remove(job)
        return key

    before = index_of_new_job(1000)
    for number in range(30):
        job = make_job(number, 1, max_tokens=100, priority=-1)
        policy.add(job, 0.0)
        iterate(policy, 0.0)
        iterate(policy, 0.0)
        job.finish_reason = FinishReason.STOP
        policy.remove(job)
    assert index_of_new_job(1001) < before  # short jobs run sooner


def test_predictions_reach_the_policy_of_the_job() -> None:
    policy = PriorityClasses(speculative)
    long, short = add(policy, 1, 1)
    for job, predicted in ((long, 50), (short, 1)):
        run_iteration(job)
        job.predicted_tokens = predicted
        policy.on_predicted(job)
    assert walked(policy) == [short.number, long.number]


def test_limits_are_those_of_the_most_urgent_priority_in_use() -> None:
    limits = iter(BatchLimits(seats, 1000) for seats in (1, 2, 3))
    policy = PriorityClasses(lambda: FCFS(next(limits)))
    assert policy.limits.max_seqs == 1
    _, urgent = add(policy, 4, -4)
    assert policy.limits.max_seqs == 3
    policy.remove(urgent)
    assert policy.limits.max_seqs == 2


# --- Turns before all priorities --------------------------------------------------------------


def keep_urgent_jobs_coming(policy: Policy, seconds: int) -> list[list[int]]:
    """Each second an urgent job arrives, which runs for a second if it may. Returns the numbers of
    the jobs of each second."""
    ran = []
    for now in range(seconds):
        policy.add(urgent := make_job(1000 + now, 1, priority=-1), float(now))
        ran.append(numbers(iterate(policy, float(now))))
        policy.remove(urgent)
    return ran


def test_without_turns_a_less_urgent_job_waits_for_ever() -> None:
    policy = classes()
    add(policy, 0)
    assert keep_urgent_jobs_coming(policy, 100) == [[1000 + now] for now in range(100)]


def test_a_job_that_starved_behind_urgent_jobs_has_a_turn_until_its_first_token() -> None:
    policy = classes(across=True)
    (job,) = add(policy, 9)
    ran = keep_urgent_jobs_coming(policy, 15)
    assert [now for now, numbers in enumerate(ran) if numbers == [0]] == [10]
    assert not job.outranks_all
    assert policy.num_promotions == 1


def test_later_turns_last_for_the_threshold() -> None:
    policy = classes(across=True)
    (job,) = add(policy, 9)
    run_iteration(job)
    ran = keep_urgent_jobs_coming(policy, 40)
    assert [now for now, numbers in enumerate(ran) if numbers == [0]] == list(range(10, 20)) + list(
        range(30, 40)
    )


def test_turns_take_a_quarter_of_the_seats() -> None:
    policy = classes(max_seqs=8, across=True)
    add(policy, *[0] * 8, *[1] * 8)
    iterate(policy, 0.0)
    batch = numbers([job for job, _ in select(policy, STARVATION_S)])
    assert batch == [8, 9, 0, 1, 2, 3, 4, 5]


def test_a_job_with_a_turn_outranks_all_others_in_memory_too() -> None:
    policy = classes(across=True)
    starved, _ = add(policy, 9, 0)
    policy.on_iteration_finished(select(policy, 5.0), 5.0)
    assert walked(policy) == [1, 0]
    walk = policy.walk(STARVATION_S, ())
    assert starved.effective_priority < -100
    assert policy.has_turn(starved)
    assert numbers(list(walk)) == [0, 1]
    estimate = policy.next_run_estimate(STARVATION_S)
    assert numbers(list(policy.by_next_run(Place.NOWHERE, estimate, last_first=False))) == [0, 1]
    assert numbers(list(policy.by_next_run(Place.NOWHERE, estimate, last_first=True))) == [1, 0]
    walk = policy.walk(STARVATION_S, ())
    walk.skip(Place.NOWHERE)
    assert list(walk) == []
    policy.remove(starved)
    assert walked(policy) == [1]


def test_turns_of_the_policy_stay_within_a_priority() -> None:
    policy = PriorityClasses(lambda: mlfq(starvation_s=STARVATION_S))
    waiting, running, _ = add(policy, 1, 1, 0)
    policy.on_iteration_finished([], 0.0)
    batch = numbers(list(policy.walk(STARVATION_S, ())))
    assert policy.has_turn(waiting)
    assert batch == [2, waiting.number, running.number]


def test_the_turn_before_all_priorities_is_configured() -> None:
    config = EngineConfig()
    policy = make_policy(config.scheduler, TIMES, max_model_len=64, kv_tokens=10_000)
    assert "before all priorities" not in policy.describe()
    given = config.with_keys(priority_starvation_ms=5000).scheduler
    policy = make_policy(given, TIMES, max_model_len=64, kv_tokens=10_000)
    assert policy.describe().endswith("before all priorities after 5000 ms")
