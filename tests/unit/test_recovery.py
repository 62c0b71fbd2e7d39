"""Lost ranks, steps sent ahead and reused KV do not change a job's tokens."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from collector import Collector
from delayed_masks import DelayedMasks
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.job import FinishReason, Job, JobState
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import BatchLimits, Policy
from fastserve_backend.token_rules import TokenRules
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job
from loop_driver import BLOCK_SIZE, WINDOWED_KINDS
from matrices import random_examples
from mortal_ranks import DOWN_S, RecoveringRig
from policies import POLICIES, make_policy, skip_join
from remembering_ranks import FIRST_TOKEN, NUM_TOKENS

NUM_JOBS = 16
LONGEST = 16 + 12  # tokens of a job
STRATEGIES = ("defer", "recompute", "reactive", "proactive")


def rig_of(policy: Policy, num_blocks: int = 100, num_stages: int = 1) -> RecoveringRig:
    kv_cache = KVCacheSection(prefix_caching=False)
    return RecoveringRig(policy, [], num_blocks, 0, kv_cache, num_stages)


@pytest.mark.slow
@random_examples(100)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(POLICIES),
    strategy=st.sampled_from(STRATEGIES),
    num_stages=st.integers(1, 2),
    ahead=st.booleans(),
    lives=st.lists(st.integers(0, 60), max_size=6),
    prefix_caching=st.booleans(),
    kinds=st.sampled_from([ONE_GROUP, *WINDOWED_KINDS]),
    rotary_switch=st.sampled_from([None, None, 6, 13, 20]),
)
def test_clients_see_what_they_would_have_seen_had_no_rank_been_lost(
    seed: int,
    name: str,
    strategy: str,
    num_stages: int,
    ahead: bool,
    lives: list[int],
    prefix_caching: bool,
    kinds: tuple[LayerKind, ...],
    rotary_switch: int | None,
) -> None:
    rng = random.Random(seed)
    limits = BatchLimits(
        rng.randint(1, 6), LONGEST + rng.randint(0, 20), rng.choice([None, rng.randint(1, 12)])
    )
    needs = BlockNeeds(BLOCK_SIZE, kinds, limits.job_tokens)
    num_blocks = needs.most(LONGEST) + needs.num_groups * rng.randint(0, 8)
    num_host_blocks = needs.num_groups * rng.choice([0, 4, 60])
    cancellations = {number: rng.uniform(0, 60) for number in range(0, NUM_JOBS, 6)}
    job_seed = rng.randint(0, 2**32)

    def serve(
        lives: list[int], *sizes: int, ahead: bool, prefix_caching: bool
    ) -> tuple[RecoveringRig, list[Collector]]:
        policy = make_policy(name, limits, starvation_s=20.0, longest=16.0)
        kv_cache = KVCacheSection(strategy=strategy, prefix_caching=prefix_caching)
        masks = DelayedMasks(rng, most_turns=0 if not lives else 3)
        rig = RecoveringRig(
            policy,
            lives,
            *sizes,
            kv_cache,
            num_stages,
            ahead,
            masks,
            kinds=kinds,
            rotary_switch=rotary_switch,
        )
        jobs = random_jobs(job_seed)
        rig.run(jobs, cancellations)
        return rig, [job.sink for job in jobs]

    _, expected = serve([], 200 * needs.num_groups, 0, ahead=False, prefix_caching=False)
    for job, client in zip(random_jobs(job_seed), expected, strict=True):
        tokens = array("i", client.token_ids)
        for end, token_id in enumerate(tokens if job.rules else ()):
            assert token_id not in job.rules.banned_after(tokens[:end])
    rig, clients = serve(
        list(lives), num_blocks, num_host_blocks, ahead=ahead, prefix_caching=prefix_caching
    )
    assert Counter(number for number, _ in rig.ends) == Counter(range(NUM_JOBS))
    for number, (client, undisturbed) in enumerate(zip(clients, expected, strict=True)):
        if number in cancellations:  # at another token, as this run took longer
            both = min(len(client.token_ids), len(undisturbed.token_ids))
            assert client.token_ids[:both] == undisturbed.token_ids[:both]
        else:
            assert client.token_ids == undisturbed.token_ids
            assert client.text == undisturbed.text
            assert client.end.finish_reason is undisturbed.end.finish_reason
    assert (rig.pool.num_used, rig.host.num_used) == (0, 0)
    assert sum(rig.loop.policy.level_sizes()) == 0
    assert not rig.executor.blocks_in_use


def random_jobs(seed: int) -> list[Job]:
    """Jobs at random, some of which differ only in their last tokens."""
    rng = random.Random(seed)
    jobs = []
    for number in range(NUM_JOBS):
        job = make_job(number, rng.randint(1, 16), arrival_s=rng.uniform(0.0, 40.0))
        same = rng.randint(0, len(job.prompt_ids))
        job.prompt_ids[same:] = array("i", (rng.randint(0, 99) for _ in job.prompt_ids[same:]))
        job.seed = rng.randint(0, 99)
        job.params = SamplingParams(
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice([0.0, 0.9]),
            presence_penalty=rng.choice([0.0] * 7 + [0.5]),
            stop=rng.choice([(), ("a", "bc")]),
            structured_output=rng.choice([None, None, StructuredOutput(regex=f"{number}")]),
        )
        if job.params.structured_output is None and rng.random() < 0.5:
            tokens = range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS)
            pairs = [rng.choices(tokens, k=2) for _ in range(rng.randint(1, 80))]
            job.rules = TokenRules(128, None, pairs, [], 0)
        job.sink = Collector()
        jobs.append(job)
    return jobs


def client_job(number: int, prompt_len: int, max_tokens: int, arrival_s: float = 0.0) -> Job:
    job = make_job(number, prompt_len, max_tokens=max_tokens, arrival_s=arrival_s)
    job.sink = Collector()
    return job


def test_the_jobs_of_a_lost_step_are_preempted_and_run_first_again() -> None:
    rig = rig_of(make_policy("fcfs", BatchLimits(2, 100)), num_stages=2)
    jobs = [client_job(number, 4, 3) for number in range(5)]
    for job in jobs:
        rig.loop.jobs.add(job)
    rig.run_cycle(2)
    assert rig.loop.jobs.num_running == 4
    assert [len(job.output_ids) for job in jobs] == [1, 1, 0, 0, 0]
    assert jobs[0].sink.token_ids == []
    rig.loop.suspend(rig.new_kv())
    states = [JobState.PREEMPTED] * 4 + [JobState.WAITING]
    assert [job.state for job in jobs] == states
    assert [job.num_computed for job in jobs] == [0] * 5
    assert rig.loop.jobs.num_running == 0
    assert rig.pool.num_used == 0
    # Tokens that came before are delivered, with or without ranks.
    assert [len(job.sink.token_ids) for job in jobs] == [1, 1, 0, 0, 0]
    rig.resume()
    rig.run_cycle()
    assert [job.state for job in jobs] == [JobState.RUNNING] * 2 + states[2:]
    rig.run()
    assert [len(job.sink.token_ids) for job in jobs] == [3] * 5
    assert [job.num_preemptions for job in jobs] == [0] * 5  # for no job


def test_without_ranks_jobs_come_and_are_cancelled_and_nobody_starves() -> None:
    policy = skip_join(BatchLimits(1, 100), starvation_s=30.0)
    rig = rig_of(policy)
    long, short = client_job(0, 8, 3), client_job(1, 2, 3)
    rig.loop.jobs.add(long)
    rig.loop.jobs.add(short)
    rig.run_cycle(2)
    levels = (long.queue_level, short.queue_level)
    rig.loop.suspend(rig.new_kv())
    rig.clock.advance_to(rig.clock.now() + DOWN_S / 2)
    late = client_job(2, 4, 1, arrival_s=rig.clock.now())
    rig.loop.jobs.add(late)
    rig.loop.jobs.cancel(1)
    assert short.sink.end.finish_reason is FinishReason.CANCELLED
    rig.clock.advance_to(rig.clock.now() + DOWN_S / 2)
    rig.resume()
    rig.run_cycle()
    assert policy.num_promotions == 0
    assert long.queue_level == levels[0]
    rig.run()
    assert sorted(number for number, _ in rig.ends) == [0, 1, 2]
    assert late.sink.end.stats.first_scheduled_s >= DOWN_S


def test_a_job_too_long_for_the_fresh_ranks_fails_alone() -> None:
    rig = rig_of(make_policy("fcfs", BatchLimits(4, 100)), num_blocks=8)
    long, short = client_job(0, 20, 8), client_job(1, 4, 8)
    rig.loop.jobs.add(long)
    rig.loop.jobs.add(short)
    rig.run_cycle()
    rig.loop.suspend(rig.new_kv())
    rig.sizes = (6, 0)
    rig.resume()
    assert long.sink.end.finish_reason is FinishReason.ERROR
    assert "28 tokens" in long.sink.end.error
    assert "holds 24" in long.sink.end.error
    late = client_job(2, 20, 5)  # admitted for the memory of the previous ranks
    rig.loop.jobs.add(late)
    assert late.sink.end.finish_reason is FinishReason.ERROR
    rig.run()
    assert len(short.sink.token_ids) == 8
    assert rig.pool.num_used == 0
