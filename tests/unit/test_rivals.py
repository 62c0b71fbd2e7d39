"""The systems that the papers compare with: job-level batching, and ORCA's number of jobs."""

from __future__ import annotations

from fastserve_backend.scheduler.base import BatchLimits
from fastserve_bench.workload import load_lengths
from jobs import make_job
from policies import iterate, select

from benchmarks.paper import rivals
from benchmarks.paper import simulated_runs as runs


def test_the_next_batch_starts_when_all_jobs_of_the_last_have_ended() -> None:
    policy = rivals.JobBatching(BatchLimits(max_seqs=2, max_tokens=100))
    jobs = [make_job(number, 3) for number in range(4)]
    for job in jobs[:3]:
        policy.add(job, 0.0)
    assert iterate(policy, 0.0) == jobs[:2]
    policy.remove(jobs[0])
    policy.add(jobs[3], 1.0)
    assert iterate(policy, 1.0) == [jobs[1]]
    policy.remove(jobs[1])
    assert iterate(policy, 2.0) == jobs[2:]


def test_a_batch_takes_only_those_who_wait_when_it_starts() -> None:
    policy = rivals.JobBatching(BatchLimits(max_seqs=2, max_tokens=100))
    first, second = make_job(0, 3), make_job(1, 3)
    assert select(policy, 0.0) == []
    policy.add(first, 0.0)
    assert iterate(policy, 0.0) == [first]
    policy.add(second, 1.0)
    assert iterate(policy, 1.0) == [first]


def test_a_job_that_is_cancelled_while_it_waits_does_not_end_a_batch() -> None:
    policy = rivals.JobBatching(BatchLimits(max_seqs=1, max_tokens=100))
    jobs = [make_job(number, 3) for number in range(3)]
    for job in jobs:
        policy.add(job, 0.0)
    assert iterate(policy, 0.0) == jobs[:1]
    policy.remove(jobs[1])
    assert iterate(policy, 1.0) == jobs[:1]
    policy.remove(jobs[0])
    assert iterate(policy, 2.0) == jobs[2:]


def test_job_batching_is_slower_than_fcfs_and_the_simulator_takes_its_policy() -> None:
    lengths = load_lengths("alpaca")
    fcfs = runs.Run(
        runs.OPT_13B, lengths, 8.0, 60, 0, runs.scheduler("fcfs"), runs.OPT_13B.swapping()
    )
    batched = rivals.faster_transformer(fcfs)
    assert batched.simulate().policy.startswith("job_batching: at most 7 jobs")
    assert (
        batched.summary().normalized_latency_s.mean > 2 * fcfs.summary().normalized_latency_s.mean
    )


def test_orca_runs_as_many_jobs_as_have_room_for_the_longest() -> None:
    fcfs = runs.Run(
        runs.OPT_13B, [(10, 10)], 1.0, 1, 0, runs.scheduler("fcfs"), runs.OPT_13B.swapping()
    )
    assert rivals.orca(fcfs).scheduler.max_num_seqs == 7  # of 2,048 tokens in 15,792
    assert not rivals.orca(fcfs).kv_cache.is_swapping
