"""The seats that follow from a profile: a bad profile cannot take them away for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import SchedulerSection
from fastserve_backend.profile.correction import CorrectedLatency
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.latency import Curve, LatencyProfile
from fastserve_backend.scheduler.base import BatchLimits, Policy
from fastserve_backend.scheduler.batch_limits import batch_limits, seats
from fastserve_backend.scheduler.policy_context import make_policy
from fastserve_backend.scheduler.registry import BUILT_IN_POLICIES
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job
from profiles import known_profile

CONFIG = EngineConfig().scheduler
MEMORY = {"max_model_len": 8192, "kv_tokens": 200_000}
DECODES = IterationLoad.of([(300, 1, True)] * 4)


def slower(profile: LatencyProfile, factor: float) -> LatencyProfile:
    def scaled(curve: Curve) -> Curve:
        return Curve(curve.knots, tuple(factor * slope_s for slope_s in curve.slopes_s))

    return replace(
        profile,
        base_s=factor * profile.base_s,
        tokens=scaled(profile.tokens),
        sampled=scaled(profile.sampled),
        decode_context_s=factor * profile.decode_context_s,
        prefill_pair_s=factor * profile.prefill_pair_s,
    )


def with_seats(num_seats: int) -> SchedulerSection:
    return EngineConfig().with_keys(max_num_seqs=num_seats).scheduler


costs = st.floats(0.0, 10.0)


@given(
    base_s=st.floats(0.01, 10.0),
    token_s=costs,
    sampled_s=costs,
    context_s=costs,
    max_model_len=st.integers(2, 10_000),
    kv_tokens=st.integers(128, 10**6),
)
def test_no_times_leave_one_seat_if_two_jobs_share_a_part_of_the_iteration(
    base_s: float,
    token_s: float,
    sampled_s: float,
    context_s: float,
    max_model_len: int,
    kv_tokens: int,
) -> None:
    profile = replace(
        known_profile(),
        base_s=base_s,
        tokens=Curve((0,), (token_s,)),
        sampled=Curve((0,), (sampled_s,)),
        decode_context_s=context_s,
    )
    assert seats(CONFIG, profile, max_model_len=max_model_len, kv_tokens=kv_tokens) >= 2


def test_one_seat_is_left_where_a_second_job_gains_nothing() -> None:
    dear = replace(known_profile(), tokens=Curve((0, 1), (0.0, 1.0)))
    assert seats(CONFIG, dear, **MEMORY) == 1
    assert seats(CONFIG, known_profile(), max_model_len=8192, kv_tokens=100) == 1


@given(factor=st.floats(1.0, 1000.0))
def test_a_slower_machine_has_no_more_seats(factor: float) -> None:
    quiet = known_profile()
    assert 2 <= seats(CONFIG, slower(quiet, factor), **MEMORY) <= seats(CONFIG, quiet, **MEMORY)


@pytest.mark.parametrize(("num_seats", "words"), [(1, "at most 1 job and"), (2, "2 jobs and")])
def test_the_words_for_seats_are_grammatical(num_seats: int, words: str) -> None:
    assert words in BatchLimits(num_seats, 100).describe()


@pytest.mark.parametrize("num_seats", [1, 50, 256])
def test_chunks_leave_a_token_for_each_seat_that_there_may_be(num_seats: int) -> None:
    limits = batch_limits(with_seats(num_seats), slower(known_profile(), 1e-3), **MEMORY)
    assert limits.prefill_chunk_tokens is not None
    assert limits.prefill_chunk_tokens <= limits.max_tokens - (num_seats - 1)
    auto = batch_limits(CONFIG, slower(known_profile(), 1e-3), **MEMORY)
    assert auto.prefill_chunk_tokens is not None
    assert auto.prefill_chunk_tokens <= auto.max_tokens - (CONFIG.most_seqs - 1)


# --- While serving ----------------------------------------------------------------------------


def served(times: CorrectedLatency, policy: Policy, factor: float) -> int:
    """The seats after iterations that take ``factor`` times as long as on the known machine."""
    for _ in range(200):
        if times.observe(DECODES, factor * known_profile().iteration_s(DECODES)):
            policy.recalibrate()
    return policy.limits.max_seqs


@pytest.mark.parametrize("name", BUILT_IN_POLICIES)
def test_a_server_that_started_busy_gains_its_seats(name: str) -> None:
    truth = seats(CONFIG, known_profile(), **MEMORY)
    times = CorrectedLatency(slower(known_profile(), 6.0))
    config = EngineConfig().with_keys(policy=name).scheduler
    policy = make_policy(config, times, **MEMORY)
    at_start = policy.limits.max_seqs
    assert at_start < truth / 2
    assert served(times, policy, 1.0) == pytest.approx(truth, rel=0.2)
    policy.add(make_job(1, 10, priority=-1), 0.0)  # a priority that comes later has as many
    assert policy.limits_for(0.0, 0, 1).max_seqs == policy.limits.max_seqs
    assert served(times, policy, 20.0) == at_start


def test_load_takes_no_seats_from_a_server_that_started_quiet() -> None:
    times = CorrectedLatency(known_profile())
    policy = make_policy(CONFIG, times, **MEMORY)
    at_start = policy.limits.max_seqs
    assert served(times, policy, 20.0) == at_start
    assert times.decode_ratio > 5


def test_seats_that_were_set_never_change() -> None:
    times = CorrectedLatency(slower(known_profile(), 6.0))
    policy = make_policy(with_seats(3), times, **MEMORY)
    assert served(times, policy, 1.0) == 3
