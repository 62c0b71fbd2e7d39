"""Policies: worked examples by hand, and properties over random histories."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, Policy
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.registry import make_policy
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job, run_iteration


@dataclass(frozen=True)
class LinearTimes:
    """Prefill 1 s a token, decode 1 s."""

    def prefill_s(self, num_tokens: int) -> float:
        return float(num_tokens)

    def decode_s(self, context_tokens: int) -> float:
        return 1.0


def skip_join(
    max_seqs: int = 1, max_tokens: int = 1000, starvation_s: float = 1e9, longest: float = 64.0
) -> SkipJoinMLFQ:
    return SkipJoinMLFQ(
        BatchLimits(max_seqs, max_tokens),
        LinearTimes(),
        base_quantum_s=1.0,
        quantum_ratio=2.0,
        starvation_s=starvation_s,
        longest_prefill_s=longest,
    )


def iterate(policy: Policy, now: float, elapsed_s: float = 1.0) -> list[Job]:
    """Select, run and account one iteration."""
    batch = policy.select(now)
    for job in batch:
        run_iteration(job)
    policy.iteration_done(batch, elapsed_s, now + elapsed_s)
    return batch


def test_quanta_double_until_they_cover_the_longest_prefill() -> None:
    assert skip_join(longest=10.0).quanta_s == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("prompt_len", "level"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (500, 6)]
)
def test_a_job_joins_the_highest_queue_whose_quantum_covers_its_prefill(
    prompt_len: int, level: int
) -> None:
    policy = skip_join()
    job = make_job(0, prompt_len)
    policy.add(job, 0.0)
    assert job.queue_level == level
    assert policy.level_sizes()[level] == 1


def test_a_job_that_used_its_quantum_is_demoted_to_the_next_queue() -> None:
    policy = skip_join()
    job = make_job(0, 4)
    policy.add(job, 0.0)
    iterate(policy, 0.0, elapsed_s=3.0)
    assert job.queue_level == 2  # 3 of 4 s used: it keeps its place
    iterate(policy, 3.0)
    assert job.queue_level == 3
    for now in range(4, 11):
        iterate(policy, float(now))
    assert job.queue_level == 3  # 7 of 8 s: used time was reset by the demotion
    iterate(policy, 11.0)
    assert job.queue_level == 4


def test_demotion_skips_queues_whose_quantum_the_next_iteration_does_not_fit() -> None:
    policy = skip_join()
    job = make_job(0, 2)
    policy.add(job, 0.0)
    assert job.queue_level == 1
    batch = policy.select(0.0)
    job.output_ids.extend([0] * 30)  # its KV was dropped: the next iteration is a prefill of 32
    policy.iteration_done(batch, 2.0, 2.0)
    assert job.queue_level == 5


def test_the_last_queue_keeps_its_jobs_in_order() -> None:
    policy = skip_join(longest=1.0)  # one queue only
    jobs = [make_job(n, 1) for n in range(3)]
    for job in jobs:
        policy.add(job, 0.0)
    for now in range(5):
        assert iterate(policy, float(now)) == [jobs[0]]


def test_a_short_newcomer_overtakes_a_long_running_job() -> None:
    policy = skip_join()
    long, short = make_job(0, 8), make_job(1, 1)
    policy.add(long, 0.0)
    assert iterate(policy, 0.0, elapsed_s=8.0) == [long]
    policy.add(short, 8.0)
    assert iterate(policy, 8.0) == [short]
    assert iterate(policy, 9.0) == [short]  # demoted to level 1, still above
    assert iterate(policy, 10.0) == [short]


def test_fifo_within_a_level() -> None:
    policy = skip_join(max_seqs=2)
    jobs = [make_job(n, 4) for n in range(4)]
    for job in jobs:
        policy.add(job, 0.0)
    assert iterate(policy, 0.0) == jobs[:2]
    assert iterate(policy, 1.0) == jobs[:2]


def test_a_job_that_never_ran_counts_its_waiting_from_arrival() -> None:
    policy = skip_join(starvation_s=10.0)
    long = make_job(0, 32)
    policy.add(long, 5.0)
    for now in range(5, 15):  # short jobs keep it waiting
        policy.add(make_job(now, 1), float(now))
        assert long not in iterate(policy, float(now), elapsed_s=0.5)
    policy.add(make_job(99, 1), 15.0)
    iterate(policy, 15.0, elapsed_s=0.5)
    assert long.queue_level == 0
    assert policy.num_promotions == 1


def test_a_promoted_job_runs_once_before_it_sinks_again() -> None:
    policy = skip_join(starvation_s=3.0)
    long, stream = make_job(0, 32), make_job(1, 1)
    policy.add(long, 0.0)
    policy.add(stream, 0.0)
    ran = [job for now in range(6) for job in iterate(policy, float(now))]
    assert long in ran
    assert long.queue_level > 0


def test_jobs_in_flight_are_not_selected_again() -> None:
    policy = skip_join(max_seqs=1)
    first, second = make_job(0, 1), make_job(1, 1)
    policy.add(first, 0.0)
    policy.add(second, 0.0)
    assert policy.select(0.0) == [first]
    assert policy.select(0.0) == [second]
    assert policy.select(0.0) == []
    policy.not_run([second])
    assert policy.select(0.0) == [second]


@pytest.mark.parametrize("make", [lambda limits: FCFS(limits), lambda limits: None])
def test_the_token_budget_passes_over_what_does_not_fit(make: object) -> None:
    limits = BatchLimits(max_seqs=8, max_tokens=10)
    policy = make(limits) or skip_join(max_seqs=8, max_tokens=10)  # type: ignore[operator]
    first, too_long, decoding = make_job(0, 8), make_job(1, 9), make_job(2, 8, computed=True)
    for job in (first, too_long, decoding):
        policy.add(job, 0.0)
    batch = policy.select(0.0)
    assert set(batch) == {first, decoding} or set(batch) == {decoding, too_long}
    assert sum(job.num_uncomputed for job in batch) <= 10


def test_fcfs_runs_to_completion_in_order_of_arrival() -> None:
    policy = FCFS(BatchLimits(max_seqs=2, max_tokens=100))
    jobs = [make_job(n, 3) for n in range(3)]
    for job in jobs:
        policy.add(job, 0.0)
    assert iterate(policy, 0.0) == jobs[:2]
    assert iterate(policy, 1.0) == jobs[:2]
    policy.remove(jobs[0])
    assert iterate(policy, 2.0) == [jobs[1], jobs[2]]
    assert list(policy.by_lowest_priority()) == [jobs[2], jobs[1]]


def test_adding_a_job_twice_is_refused() -> None:
    for policy in (skip_join(), FCFS(BatchLimits(1, 1))):
        job = make_job(0, 1)
        policy.add(job, 0.0)
        with pytest.raises(ValueError, match="already queued"):
            policy.add(job, 0.0)


def test_derived_parameters_come_from_the_profile_and_the_slo() -> None:
    config = EngineConfig().scheduler
    policy = make_policy(config, LinearTimes(), max_model_len=64)
    assert isinstance(policy, SkipJoinMLFQ)
    assert policy.quanta_s[0] == 1.0
    assert policy.quanta_s[-1] >= 64.0
    assert "promotion after 3000 ms" in policy.describe()
    given = EngineConfig().with_keys(base_quantum_ms=20, starvation_ms=700, quantum_ratio=4)
    policy = make_policy(given.scheduler, LinearTimes(), max_model_len=64)
    assert isinstance(policy, SkipJoinMLFQ)
    assert policy.quanta_s[:2] == pytest.approx((0.02, 0.08))
    assert "promotion after 700 ms" in policy.describe()
    fcfs = make_policy(EngineConfig().with_keys(policy="fcfs").scheduler, LinearTimes(), 64)
    assert fcfs.describe() == "fcfs"


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), policy_name=st.sampled_from(["fcfs", "skip_join_mlfq"]))
def test_random_histories_lose_no_job_and_starve_none(seed: int, policy_name: str) -> None:
    """Work conservation, limits, order in a level, and the starvation bound, over one history."""
    rng = random.Random(seed)
    limits = BatchLimits(max_seqs=rng.randint(1, 6), max_tokens=rng.randint(40, 80))
    starvation_s = rng.choice([5.0, 30.0])
    policy: Policy = FCFS(limits)
    if policy_name == "skip_join_mlfq":
        policy = skip_join(limits.max_seqs, limits.max_tokens, starvation_s, longest=40.0)
    remaining: dict[int, int] = {}
    known: dict[int, Job] = {}
    last_ran: dict[int, float] = {}
    now, arrived, ended = 0.0, 0, 0
    while arrived < 40 or known:
        while arrived < 40 and (rng.random() < 0.5 or not known):
            job = make_job(arrived, rng.randint(1, 40))
            known[arrived], remaining[arrived] = job, rng.randint(1, 25)
            last_ran[arrived] = now
            policy.add(job, now)
            arrived += 1
        if known and rng.random() < 0.05:
            job = known.pop(rng.choice(list(known)))  # cancelled between iterations
            policy.remove(job)
            ended += 1
            continue
        levels_before = {n: job.queue_level for n, job in known.items()}
        batch = policy.select(now)
        assert batch, "jobs wait and nothing runs"
        assert len(batch) <= limits.max_seqs
        assert sum(job.num_uncomputed for job in batch) <= limits.max_tokens
        assert len({job.number for job in batch}) == len(batch)
        if len(batch) < min(limits.max_seqs, len(known)):
            room = limits.max_tokens - sum(job.num_uncomputed for job in batch)
            left_out = [job for job in known.values() if job not in batch]
            assert any(job.num_uncomputed > room for job in left_out) or room == 0
        elapsed = rng.choice([0.5, 1.0, 3.0])
        now += elapsed
        for job in batch:
            run_iteration(job)
            last_ran[job.number] = now
        policy.iteration_done(batch, elapsed, now)
        for job in known.values():
            if job not in batch:  # a waiting job only ever goes up
                assert job.queue_level in (levels_before[job.number], 0)
        for job in batch:
            remaining[job.number] -= 1
            if remaining[job.number] == 0:
                policy.remove(known.pop(job.number))
                ended += 1
        assert sum(policy.level_sizes()) == len(known)
        assert {job.number for job in policy.by_lowest_priority()} == set(known)
        if policy_name == "skip_join_mlfq":
            # After its threshold a job stands in Q1 in order, behind at most all the others.
            bound = starvation_s + 3.0 * (len(known) + 2) * 40
            assert all(now - last_ran[n] <= bound for n in known)
    assert ended == 40
