"""Policies built from the configuration, the latency profile and the SLO."""

from __future__ import annotations

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.fixed_priority import FixedPriority
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.mlfq import MLFQ
from fastserve_backend.scheduler.policy_context import make_policy
from fastserve_backend.scheduler.registry import load_policy
from fastserve_backend.scheduler.sarathi_edf import SarathiEDF
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from fastserve_backend.scheduler.slo import SLO
from fastserve_backend.scheduler.speculative import Speculative
from fastserve_backend.scheduler.srpt import SRPT
from fastserve_backend.scheduler.uniboost import UniBoost
from jobs import make_job
from policies import POLICIES, TIMES, LinearTimes, select


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fcfs", FCFS),
        ("fixed_priority", FixedPriority),
        ("srpt", SRPT),
        ("mlfq", MLFQ),
        ("skip_join_mlfq", SkipJoinMLFQ),
        ("gittins", Gittins),
        ("slo", SLO),
        ("speculative", Speculative),
        ("sarathi_edf", SarathiEDF),
        ("uniboost", UniBoost),
    ],
)
def test_each_name_makes_its_policy(name: str, kind: type) -> None:
    config = EngineConfig().with_keys(policy=name, max_num_seqs=4, prefill_chunk_tokens=8)
    policy = make_policy(config.scheduler, TIMES, max_model_len=64, kv_tokens=10_000)
    assert load_policy(name) is kind
    assert policy.describe().startswith(f"{name}: ")
    assert "at most 4 jobs and 2048 tokens an iteration, prefill in chunks of 8" in (
        policy.describe()
    )
    for number in range(6):
        policy.add(make_job(number, 3), 0.0)
    assert [num_tokens for _, num_tokens in select(policy, 0.0)] == [3, 3, 2]


def test_a_balanced_gittins_index_is_the_default() -> None:
    policy = make_policy(EngineConfig().scheduler, TIMES, max_model_len=64, kv_tokens=10_000)
    assert "objective balanced" in policy.describe()


@pytest.mark.parametrize("name", ["mlfq", "skip_join_mlfq"])
def test_derived_parameters_come_from_the_profile_and_the_slo(name: str) -> None:
    config = EngineConfig().with_keys(policy=name)
    policy = make_policy(config.scheduler, TIMES, max_model_len=64, kv_tokens=10_000)
    assert policy.quanta_s == (1, 2, 4, 8, 16, 32, 64)
    assert "promotion after 60000 ms" in policy.describe()
    given = config.with_keys(base_quantum_ms=20, starvation_ms=700, quantum_ratio=4)
    policy = make_policy(given.scheduler, TIMES, max_model_len=64, kv_tokens=10_000)
    quanta_s = [quantum_s for quantum_s in policy.quanta_s if quantum_s is not None]
    assert quanta_s[:2] == pytest.approx([0.02, 0.08])
    assert quanta_s[-2] < 64 <= quanta_s[-1]
    assert "promotion after 700 ms" in policy.describe()


class DriftingTimes(LinearTimes):
    """Times of a machine that as a whole becomes slower or faster by ``factor``."""

    factor = 1.0

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens * self.factor

    def decode_s(self, context_tokens: int) -> float:
        return self.factor


def test_recalibration_follows_the_profile_but_not_a_quantum_that_was_set() -> None:
    times = DriftingTimes()
    queues = EngineConfig().with_keys(policy="skip_join_mlfq")
    auto, fixed = (
        make_policy(config.scheduler, times, max_model_len=4, kv_tokens=10_000)
        for config in (queues, queues.with_keys(base_quantum_ms=500))
    )
    DriftingTimes.factor = 1.5
    for policy in (auto, fixed):
        policy.recalibrate()
    assert auto.quanta_s == (1.5, 3, 6)
    assert fixed.quanta_s == (0.5, 1, 2, 4)


def test_whole_prompts_longer_than_an_iteration_run_in_chunks_of_one() -> None:
    config = (
        EngineConfig()
        .with_keys(max_num_batched_tokens=100, max_num_seqs=16, prefill_chunk_tokens="whole")
        .scheduler
    )
    policy = make_policy(config, TIMES, max_model_len=101, kv_tokens=10_000)
    assert "prefill in chunks of 100" in policy.describe()
    policy.add(make_job(0, 101), 0.0)
    assert [num_tokens for _, num_tokens in select(policy, 0.0)] == [100]
    fits = make_policy(config, TIMES, max_model_len=100, kv_tokens=10_000)
    assert "chunk" not in fits.describe()


@pytest.mark.parametrize("chunk_tokens", [0, -1, 1.5])
def test_impossible_chunks_are_refused(chunk_tokens: float) -> None:
    with pytest.raises(ConfigError, match="prefill_chunk_tokens"):
        EngineConfig().with_keys(prefill_chunk_tokens=chunk_tokens)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"prefill_chunk_tokens": 2049}, "2049; must be 'auto', 'whole' or from 1 to .*2048"),
        ({"prefill_chunk_tokens": "half"}, "prefill_chunk_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0; must be 'auto' or from 1 to 4096"),
        ({"max_num_seqs": 5000, "max_num_batched_tokens": 9000}, "max_num_seqs: got 5000"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens: got 32"),
    ],
)
def test_impossible_limits_are_refused(keys: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig().with_keys(**keys)


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.policy") as caught:
        EngineConfig().with_keys(policy="lifo")
    assert all(name in str(caught.value) for name in POLICIES)
