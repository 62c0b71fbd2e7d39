"""Random histories of the step loop with priorities: short memory, swaps, chunks, stages or steps
sent ahead."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.round import Round, RoundResult
from fastserve_backend.offers import OfferAnswer, OfferOutcome
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.scheduler.base import BatchLimits, Policy
from fastserve_backend.scheduler.priority_classes import PriorityClasses
from fastserve_backend.scheduler.promotion import Promotion
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job
from loop_driver import BLOCK_SIZE, WINDOWED_KINDS, Rig
from matrices import random_examples
from policies import POLICIES, make_policy

LONGEST = 16 + 12
NUM_JOBS = 25


class WatchedRound:
    """Checks that a job is refused only if free blocks, and those of less urgent jobs that may
    leave, are too few for it."""

    def __init__(self, kv: KVManager, kv_round: Round, jobs: Collection[Job]) -> None:
        self._tiers = kv.tiers
        self._round = kv_round
        self._jobs = jobs
        self._last_priority = float("-inf")

    def find_prefix(self, job: Job) -> None:
        self._round.find_prefix(job)

    def offer(self, job: Job, num_tokens: int) -> OfferAnswer:
        assert job.effective_priority >= self._last_priority
        self._last_priority = job.effective_priority
        # Jobs are closed to by jobs that come before them, so these are at least as urgent.
        is_closed = self._round._is_closed_to_new and job.number not in self._round._have_kv
        could = not is_closed and self._could(job, num_tokens)
        answer = self._round.offer(job, num_tokens)
        if could and answer.outcome is OfferOutcome.NO_ROOM:
            assert self._round._room.is_too_early
        return answer

    def commit(self) -> RoundResult:
        return self._round.commit()

    def _could(self, job: Job, num_tokens: int) -> bool:
        room, state, tiers = self._round._room, self._round._state, self._tiers
        if tiers.transfers.of(job.number) is not None:
            return False
        if tiers.is_swapped_out(job.number):
            needed = tiers.needs.for_step(job.num_computed, job.num_computed + num_tokens)
        else:
            needed = tiers.device.missing(job.number, job.num_ready + num_tokens, job.num_ready)
        if not room._leaves_room_to_grow(job, needed):  # for jobs of the same priority
            return False
        behind = sum(
            tiers.device.num_held(other.number)
            for other in self._jobs
            if other.effective_priority > job.effective_priority and state.may_leave(other)
        )
        return needed + room.num_promised <= tiers.device.num_free + behind


class WatchedRig(Rig):
    def __init__(self, policy: Policy, jobs: Collection[Job], **options: object) -> None:
        super().__init__(policy, **options)  # type: ignore[arg-type]
        kv = self.loop.kv
        start_round = kv.start_round

        def start_watched_round(*args: object) -> WatchedRound:
            return WatchedRound(kv, start_round(*args), jobs)  # type: ignore[arg-type]

        kv.start_round = start_watched_round  # type: ignore[method-assign, assignment]


@pytest.mark.slow
@random_examples(150)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(POLICIES),
    num_stages=st.integers(1, 3),
    ahead=st.booleans(),
    strategy=st.sampled_from(["recompute", "reactive", "proactive"]),
    num_host_blocks=st.sampled_from([0, 6, 40]),
    has_across=st.booleans(),
    kinds=st.sampled_from([ONE_GROUP, ONE_GROUP, *WINDOWED_KINDS]),
)
def test_no_job_keeps_memory_from_a_more_urgent_one_and_all_end(
    seed: int,
    name: str,
    num_stages: int,
    ahead: bool,
    strategy: str,
    num_host_blocks: int,
    has_across: bool,
    kinds: tuple[LayerKind, ...],
) -> None:
    rng = random.Random(seed)
    limits = BatchLimits(rng.randint(1, 6), rng.randint(6, 30), rng.randint(1, 12))
    starvation_s = rng.choice([20.0, 200.0])
    across = Promotion(starvation_s, lambda job: 1.0) if has_across else None
    policy = PriorityClasses(
        lambda: make_policy(name, limits, starvation_s=starvation_s, longest=16.0), across
    )
    jobs = [
        make_job(
            number,
            rng.randint(1, 16),
            max_tokens=rng.randint(1, 12),
            arrival_s=rng.uniform(0.0, 60.0),
            priority=rng.choice([-1, 0, 0, 2, 3]),
        )
        for number in range(NUM_JOBS)
    ]
    needs = BlockNeeds(BLOCK_SIZE, kinds, limits.job_tokens)
    rig = WatchedRig(
        policy,
        jobs,
        kinds=kinds,
        num_blocks=needs.most(LONGEST) + needs.num_groups * rng.randint(0, 12),
        num_host_blocks=num_host_blocks,
        link=rng.choice([Link(1e-9, 1e-9), Link(0.3, 0.3)]),
        num_stages=num_stages,
        kv_cache=KVCacheSection(strategy=strategy, prefix_caching=False),  # type: ignore[arg-type]
        ahead=ahead,
    )
    cancellations = {n: jobs[n].arrival_s + rng.uniform(0, 40) for n in range(0, NUM_JOBS, 6)}
    rig.run(jobs, cancellations)
    assert sorted(number for number, _ in rig.ends) == list(range(NUM_JOBS))
    assert rig.pool.num_used == rig.host.num_used == 0
    assert not any(job.outranks_all for job in jobs)
    for number, reason in rig.ends:
        if reason is FinishReason.LENGTH:
            assert len(jobs[number].output_ids) == jobs[number].params.max_tokens
        else:
            assert number in cancellations
