"""Random histories of the step loop: short memory, chunks, stages or steps sent ahead,
cancellations, stop words."""

from __future__ import annotations

import random

from fastserve_backend.job import FinishReason, JobState
from fastserve_backend.job_trace import JobTrace
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind
from fastserve_backend.scheduler.base import BatchLimits
from hypothesis import example, given
from hypothesis import strategies as st
from jobs import make_job
from loop_driver import BLOCK_SIZE, WINDOWED_KINDS, Rig
from matrices import random_examples
from policies import POLICIES, make_policy


# Turns of starving jobs that end within prefills.
@example(seed=2**32, name="gittins", num_stages=1, ahead=False, chunk=True, kinds=ONE_GROUP)
@random_examples(120)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(POLICIES),
    num_stages=st.integers(1, 3),
    ahead=st.booleans(),
    chunk=st.booleans(),
    kinds=st.sampled_from([ONE_GROUP, *WINDOWED_KINDS]),
)
def test_every_job_ends_once_and_everything_is_freed(
    seed: int,
    name: str,
    num_stages: int,
    ahead: bool,
    chunk: bool,
    kinds: tuple[LayerKind, ...],
) -> None:
    rng = random.Random(seed)
    longest = 16 + 12
    limits = BatchLimits(rng.randint(1, 6), rng.randint(4, 20), rng.randint(1, 12))
    if not chunk:
        limits = BatchLimits(rng.randint(1, 6), longest + rng.randint(0, 20))
    policy = make_policy(name, limits, starvation_s=rng.choice([20.0, 200.0]), longest=16.0)
    needs = BlockNeeds(BLOCK_SIZE, kinds, limits.job_tokens)
    num_blocks = needs.most(longest) + needs.num_groups * rng.randint(0, 8)
    rig = Rig(policy, num_blocks=num_blocks, num_stages=num_stages, ahead=ahead, kinds=kinds)
    jobs = [
        make_job(
            number,
            rng.randint(1, 16),
            max_tokens=rng.randint(1, 12),
            arrival_s=rng.uniform(0.0, 60.0),
        )
        for number in range(25)
    ]
    traces = [JobTrace() for _ in jobs]
    for job, trace in zip(jobs, traces, strict=True):
        job.trace = trace
    cancellations = {n: jobs[n].arrival_s + rng.uniform(0, 40) for n in range(0, 25, 6)}
    for number in range(1, 25, 8):
        rig.delivery.stop_after[number] = rng.randint(1, 12)
    rig.run(jobs, cancellations)
    assert sorted(number for number, _ in rig.ends) == list(range(25))
    assert rig.pool.num_used == 0
    assert sum(policy.level_sizes()) == 0
    assert not rig.executor.blocks_in_use
    assert rig.counters.peak_blocks <= num_blocks
    assert rig.counters.preemptions == sum(job.num_preemptions for job in jobs)
    reasons = dict(rig.ends)
    for job, trace in zip(jobs, traces, strict=True):
        trace.on_running(rig.clock.now())  # for jobs that were cancelled while they waited
        assert len(trace.periods) == job.num_preemptions
        edges = [s for period in trace.periods for s in (period.start_s, period.end_s)]
        assert edges == sorted(edges)
        assert job.state is JobState.FINISHED
        num_tokens = len(job.output_ids)
        if reasons[job.number] is FinishReason.LENGTH:
            assert num_tokens == job.params.max_tokens == rig.delivery.num_tokens[job.number]
        elif reasons[job.number] is FinishReason.STOP:
            assert rig.delivery.num_tokens[job.number] == rig.delivery.stop_after[job.number]
        else:
            assert job.number in cancellations
        if num_tokens:
            assert job.first_token_s is not None
            assert job.last_token_s is not None
            assert job.first_scheduled_s is not None
            assert job.arrival_s <= job.first_scheduled_s < job.first_token_s <= job.last_token_s
        if num_tokens and reasons[job.number] is FinishReason.LENGTH:
            assert job.last_token_s is not None
            assert job.last_token_s - job.arrival_s >= job.executed_s - 1e-6
            # The least time: a prefill of n tokens and the decodes after it.
            prefill_s = len(job.prompt_ids) if not chunk else 1
            assert job.executed_s >= prefill_s + num_tokens - 1 - 1e-6
