"""Whatever happens to held KV, clients see the same tokens, and jobs the same memory."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest
from collector import Collector
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job, ServiceLevel
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import BatchLimits
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job
from loop_driver import BLOCK_SIZE, MOST_CYCLES, WINDOWED_KINDS, Rig
from matrices import random_examples
from mortal_ranks import RecoveringRig
from policies import POLICIES, TIMES, make_policy

STRATEGIES = ("defer", "recompute", "reactive", "proactive")
NUM_SESSIONS = 5
MOST_TURNS = 5
LONGEST = 64  # tokens of a job


@dataclass
class Session:
    """A conversation, and when its next turn is due."""

    name: str
    due_s: float
    turns_left: int
    history: list[int] = field(default_factory=list)
    job: Job | None = None


class Conversations:
    """Sessions whose next turns come after the answers. They pause, edit what was said, begin two
    turns at once, and give up turns."""

    def __init__(self, rig: RecoveringRig, rng: random.Random) -> None:
        self.jobs: list[Job] = []
        self._rig, self._rng = rig, rng
        self._sessions = [
            Session(rng.choice(["same", f"s{number}"]), rng.uniform(0, 20), MOST_TURNS)
            for number in range(NUM_SESSIONS)
        ]
        self._to_cancel: dict[int, float] = {}

    def run(self) -> None:
        rig = self._rig
        for _ in range(MOST_CYCLES):
            waiting = [one for one in self._sessions if one.job is None and one.turns_left]
            for session in waiting:
                if session.due_s <= rig.clock.now():
                    self._begin_turn(session)
            for number, time_s in list(self._to_cancel.items()):
                if time_s <= rig.clock.now():
                    rig.loop.jobs.cancel(number)
                    del self._to_cancel[number]
            for session in self._sessions:
                if session.job is not None and session.job.finish_reason is not None:
                    self._end_turn(session, session.job)
            due = [one.due_s for one in self._sessions if one.job is None and one.turns_left]
            rig.executor.wake_s = min(due, default=float("inf"))
            if not rig.loop.is_idle:
                rig.run_cycle()
            elif due:
                rig.clock.advance_to(max(rig.clock.now(), min(due)))
            elif all(one.job is None for one in self._sessions):
                return
        raise AssertionError("the loop turns and nothing comes of it")

    def _begin_turn(self, session: Session) -> None:
        rng = self._rng
        if rng.random() < 0.2 and session.history:  # an edit
            session.history[rng.randrange(len(session.history))] = rng.randint(0, 99)
        session.history += [rng.randint(0, 99) for _ in range(rng.randint(1, 8))]
        del session.history[: max(0, len(session.history) - LONGEST + 12)]
        job = make_job(len(self.jobs), 1, arrival_s=self._rig.clock.now())
        job.prompt_ids = array("i", session.history)
        job.params = SamplingParams(
            max_tokens=rng.randint(1, 12), temperature=0, stop=rng.choice([(), ("a",)])
        )
        job.service = ServiceLevel(tenant=rng.choice("ab"), session_id=session.name)
        job.sink = Collector()
        self.jobs.append(job)
        session.job, session.turns_left = job, session.turns_left - 1
        if rng.random() < 0.15:
            self._to_cancel[job.number] = job.arrival_s + rng.uniform(0, 30)
        self._rig.loop.jobs.add(job)

    def _end_turn(self, session: Session, job: Job) -> None:
        session.history = list(job.prompt_ids + job.output_ids)
        session.due_s = self._rig.clock.now() + self._rng.choice([0.0, 3.0, 40.0])
        session.job = None


@pytest.mark.slow
@random_examples(150)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(POLICIES),
    strategy=st.sampled_from(STRATEGIES),
    incremental=st.booleans(),
    num_stages=st.integers(1, 2),
    ahead=st.booleans(),
    lives=st.lists(st.integers(0, 200), max_size=2),
    prefix_caching=st.booleans(),
    kinds=st.sampled_from([ONE_GROUP, ONE_GROUP, *WINDOWED_KINDS]),
    rotary_switch=st.sampled_from([None, None, None, 20]),
    ttl_s=st.sampled_from(["auto", 0, 8.0, 1000.0]),
)
def test_turns_get_the_tokens_that_they_would_get_alone(
    seed: int,
    name: str,
    strategy: str,
    incremental: bool,
    num_stages: int,
    ahead: bool,
    lives: list[int],
    prefix_caching: bool,
    kinds: tuple[LayerKind, ...],
    rotary_switch: int | None,
    ttl_s: object,
) -> None:
    rng = random.Random(seed)
    limits = BatchLimits(
        rng.randint(1, 4), LONGEST + rng.randint(0, 20), rng.choice([None, rng.randint(1, 12)])
    )
    needs = BlockNeeds(BLOCK_SIZE, kinds, limits.job_tokens)
    num_blocks = needs.most(LONGEST) + needs.num_groups * rng.randint(0, 30)
    num_host_blocks = needs.num_groups * rng.choice([0, 10, 60])
    num_slots = needs.num_groups * rng.choice([0, 12, 20, 100])
    kv_cache = KVCacheSection.model_validate(
        {
            "strategy": strategy,
            "incremental": incremental,
            "prefix_caching": prefix_caching,
            "session_ttl_s": ttl_s,
        }
    )

    def rig_of(
        lives: list[int], num_blocks: int, num_host_blocks: int, history: SessionHistory | None
    ) -> RecoveringRig:
        return RecoveringRig(
            make_policy(name, limits, starvation_s=20.0, longest=16.0),
            lives,
            num_blocks,
            num_host_blocks,
            kv_cache,
            num_stages,
            ahead and history is not None,
            copy_fails=lambda: history is not None and rng.random() < 0.05,
            kinds=kinds,
            rotary_switch=rotary_switch,
            history=history,
            num_slots=num_slots,
        )

    history = SessionHistory(kv_cache.session_ttl_s, TIMES, inherits_age=rng.random() < 0.5)
    rig = rig_of(list(lives), num_blocks, num_host_blocks, history)
    conversations = Conversations(rig, rng)
    conversations.run()
    assert sum(rig.loop.policy.level_sizes()) == 0
    held = rig.loop.kv.tiers.held
    assert (rig.pool.num_used, rig.host.num_used) == (held.device, held.idle_host)

    assert_as_alone(conversations.jobs, rig_of([], needs.most(LONGEST), 0, None))


def assert_as_alone(jobs: list[Job], alone: RecoveringRig) -> None:
    """The jobs got the tokens that they get one after the other."""
    for job in jobs:
        twin = make_job(job.number, 1, arrival_s=alone.clock.now())
        twin.prompt_ids, twin.params, twin.sink = job.prompt_ids, job.params, Collector()
        alone.run([twin])
        both = len(job.output_ids)
        if job.finish_reason is not FinishReason.CANCELLED:
            assert job.finish_reason is twin.finish_reason
            both = len(twin.output_ids)
        assert job.output_ids[:both] == twin.output_ids[:both]


@pytest.mark.slow
def test_turns_get_the_same_tokens_from_the_disk() -> None:
    """The device and the host are too small for all sessions. Some copies fail."""
    rng = random.Random(3)
    num_written = num_read = num_failed = 0
    for _ in range(40):
        counters = _serve_from_disk(rng)
        num_written += counters.disk_write_bytes
        num_read += counters.disk_read_bytes
        num_failed += counters.disk_failures
    assert min(num_written, num_read, num_failed) > 0


def _serve_from_disk(rng: random.Random) -> EngineCounters:
    kinds = rng.choice([ONE_GROUP, *WINDOWED_KINDS])
    limits = BatchLimits(rng.randint(1, 4), LONGEST, rng.choice([None, 8]))
    needs = BlockNeeds(BLOCK_SIZE, kinds, limits.job_tokens)
    most = needs.most(LONGEST)

    def rig_of(num_slots: int, history: SessionHistory | None) -> RecoveringRig:
        return RecoveringRig(
            make_policy("fcfs", limits, starvation_s=20.0, longest=16.0),
            [],
            most + needs.num_groups,
            most,
            KVCacheSection(session_ttl_s=1000.0),
            num_stages=1,
            copy_fails=lambda: history is not None and rng.random() < 0.03,
            kinds=kinds,
            history=history,
            num_slots=num_slots,
        )

    rig = rig_of(rng.choice([1, 2, 9]) * most, SessionHistory(1000.0, TIMES, inherits_age=False))
    conversations = Conversations(rig, rng)
    conversations.run()
    assert rig.host.num_used == rig.loop.kv.tiers.held.idle_host
    assert_as_alone(conversations.jobs, rig_of(0, None))
    return rig.counters


@pytest.mark.slow
@random_examples(60)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(POLICIES),
    strategy=st.sampled_from(["recompute", "reactive", "proactive"]),
    num_stages=st.integers(1, 2),
    ahead=st.booleans(),
    kinds=st.sampled_from([ONE_GROUP, *WINDOWED_KINDS]),
)
def test_held_kv_delays_no_job(
    seed: int,
    name: str,
    strategy: str,
    num_stages: int,
    ahead: bool,
    kinds: tuple[LayerKind, ...],
) -> None:
    """Jobs of sessions that never return run exactly when they run without sessions."""

    def serve(*, has_sessions: bool) -> list[Job]:
        rng = random.Random(seed)
        limits = BatchLimits(rng.randint(1, 6), 28 + rng.randint(0, 20), rng.choice([None, 5]))
        needs = BlockNeeds(BLOCK_SIZE, kinds, limits.job_tokens)
        rig = Rig(
            make_policy(name, limits, starvation_s=20.0, longest=16.0),
            num_blocks=needs.most(28) + needs.num_groups * rng.randint(0, 8),
            num_stages=num_stages,
            ahead=ahead,
            kinds=kinds,
            kv_cache=KVCacheSection.model_validate(
                {"strategy": strategy, "prefix_caching": False, "session_ttl_s": 1e4}
            ),
            history=SessionHistory(1e4, TIMES, inherits_age=False),
        )
        jobs = []
        for number in range(25):
            arrival_s = rng.uniform(0.0, 60.0)
            job = make_job(number, rng.randint(1, 16), max_tokens=rng.randint(1, 12))
            job.arrival_s = arrival_s
            if has_sessions:
                job.service = ServiceLevel(session_id=f"{number}")
            jobs.append(job)
        rig.run(jobs)
        assert (rig.loop.kv.tiers.held.device > 0) is has_sessions
        assert rig.pool.num_used == rig.loop.kv.tiers.held.device
        return jobs

    def times(jobs: list[Job]) -> list[tuple[float | None, ...]]:
        return [(one.first_scheduled_s, one.first_token_s, one.last_token_s) for one in jobs]

    assert times(serve(has_sessions=True)) == times(serve(has_sessions=False))
