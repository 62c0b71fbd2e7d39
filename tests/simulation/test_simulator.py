"""Traces through the engine's loop on a virtual clock, by the thousand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.loop_setup import KVMemory
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.simulation.predictions import make_predictions
from fastserve_backend.simulation.simulator import Simulation, simulate
from fastserve_bench.report.summary import summarize
from fastserve_bench.workload import ServiceClass, TraceJob, Workload
from matrices import rounds

POLICIES = ("fcfs", "mlfq", "fixed_priority", "skip_join_mlfq", "srpt", "speculative", "gittins")
BLOCK_SIZE = 8
STRATEGIES = ("defer", "recompute", "reactive", "proactive")
LONGEST = 24  # tokens of a random job


class Machine(LatencyModel):
    """An iteration takes 10 ms, and 1 ms a token. The pipeline has ``num_stages``."""

    def __init__(self, num_stages: int = 1) -> None:
        self.num_stages = num_stages

    def iteration_s(self, load: IterationLoad) -> float:
        return 0.010 + 0.001 * load.num_tokens


def random_simulation(seed: int) -> tuple[list[TraceJob], Simulation]:
    """Simulates a small trace on a set-up that is often short of blocks, seats and tokens."""
    rng = random.Random(seed)
    arrival_s, trace = 0.0, []
    for _ in range(rng.randint(1, 9)):
        arrival_s += rng.choice([0.0, rng.expovariate(20.0), rng.expovariate(2.0)])
        prompt = rng.randint(1, LONGEST - 1)
        output = rng.randint(1, min(8, LONGEST - prompt))
        service = ServiceClass(priority=rng.choice([0, 0, 0, -1, 2]))
        trace.append(TraceJob(arrival_s, prompt, output, service=service))
    max_tokens = rng.randint(4, 2 * LONGEST)
    chunk = rng.choice(["auto", "whole", "whole", 1, 4, max_tokens])
    config = EngineConfig().with_keys(
        policy=rng.choice(POLICIES),
        max_num_seqs=rng.choice(["auto", 1, 2, 3, 4]),
        max_num_batched_tokens=max_tokens,
        prefill_chunk_tokens=chunk,
        quantum_ratio=rng.choice([1.5, 2.0, 4.0]),
        starvation_ms=rng.choice([20.0, 200.0, 30000.0]),
        priority_starvation_ms=rng.choice([None, 100.0]),
        block_size=BLOCK_SIZE,
        strategy=rng.choice(STRATEGIES),
        incremental=rng.random() < 0.7,
        write_back=rng.random() < 0.7,
    )
    simulation = simulate(
        trace,
        config.scheduler,
        config.kv_cache,
        Machine(rng.randint(1, 3)),
        KVMemory(
            num_blocks=LONGEST // BLOCK_SIZE + rng.choice([0, 0, 2, 100]),
            num_host_blocks=rng.choice([0, 3, 20, 1000]),
            block_bytes=1000,
            link=Link(rng.choice([0.0001, 0.002, 0.02]), rng.choice([0.0001, 0.002, 0.02])),
        ),
        max_model_len=LONGEST,
        predictions=rng.choice([None, [rng.randint(0, LONGEST) for _ in trace]]),
        check_integrity=True,
    )
    return trace, simulation


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(n, marks=pytest.mark.repeated) for n in range(1000, 10_000, 1000))],
)
def test_ten_thousand_random_traces(first: int) -> None:
    """No job is lost or late by magic, and the block tables are whole after every step. `make test`
    has 200 of them."""
    num_recomputed = num_preempted = 0
    num_traces = rounds(200, many=1000)
    for seed in range(first, first + num_traces):
        trace, simulation = random_simulation(seed)
        records = simulation.records
        assert [(r.prompt_tokens, r.output_tokens) for r in records] == [
            (job.prompt_tokens, job.output_tokens) for job in trace
        ]
        for job, record in zip(trace, records, strict=True):
            assert record.arrival_s == job.arrival_s
            assert job.arrival_s <= record.first_scheduled_s < record.first_token_s
            assert record.first_token_s <= record.last_token_s <= simulation.ended_s
            # The job ran in at least one iteration for each token, and never in two at once.
            iterations_s = 0.010 * job.output_tokens + 0.001 * job.prompt_tokens
            assert record.executed_s >= iterations_s - 1e-9
            assert record.executed_s <= record.last_token_s - record.first_scheduled_s + 1e-9
        assert simulation.counters.generation_tokens == sum(job.output_tokens for job in trace)
        num_recomputed += simulation.counters.recomputed_jobs
        num_preempted += simulation.counters.preemptions
    assert num_recomputed > num_traces / 10
    assert num_preempted > num_traces / 10


def test_the_same_seed_gives_the_same_result_to_the_last_bit() -> None:
    for seed in range(20):
        first, second = random_simulation(seed), random_simulation(seed)
        assert first[1].records == second[1].records
        assert first[1].counters == second[1].counters
    assert random_simulation(1)[1].records != random_simulation(2)[1].records


def run(trace: list[TraceJob], error: float | None = None, **keys: object) -> Simulation:
    """``error`` is that of predictions; None means no predictions."""
    config = EngineConfig().with_keys(**keys)
    predictions = None
    if error is not None:
        predictions = make_predictions([job.output_tokens for job in trace], error, seed=0)
    return simulate(
        trace,
        config.scheduler,
        config.kv_cache,
        Machine(),
        KVMemory(10_000, 0, 1000, Link(0.0, 0.0)),
        max_model_len=2048,
        predictions=predictions,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_of_an_urgent_class_wait_for_none_of_another(policy: str) -> None:
    """Long jobs fill all seats when the urgent ones come."""
    urgent = ServiceClass("urgent", priority=-1, ttft_slo_s=0.2)
    trace = [TraceJob(0.0, 20, 400) for _ in range(8)]
    trace += [TraceJob(0.5 * number, 20, 4, service=urgent) for number in range(1, 6)]
    records = run(trace, policy=policy, max_num_seqs=4).records
    assert [record.service.name for record in records] == [""] * 8 + ["urgent"] * 5
    assert all(record.ttft_s < 0.1 for record in records[8:])


def test_a_job_alone_takes_its_iterations_and_no_more() -> None:
    (record,) = run([TraceJob(5.0, 100, 11)], prefill_chunk_tokens="whole").records
    assert record.first_scheduled_s == 5.0
    assert record.ttft_s == pytest.approx(0.110)
    assert record.latency_s == pytest.approx(0.110 + 10 * 0.011)
    assert record.alone_s == pytest.approx(record.latency_s)
    assert record.queueing_share == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_preemption_saves_short_jobs_and_the_oracle_is_ahead() -> None:
    """The policies reach their goals on a workload that overloads the machine."""
    trace = Workload("sharegpt", 150, seed=3).trace(6.0)
    mean = {
        policy: summarize(run(trace, policy=policy).records).normalized_latency_s.mean
        for policy in POLICIES
    }
    assert mean["srpt"] < mean["skip_join_mlfq"] < mean["fcfs"]
    assert mean["srpt"] < mean["fixed_priority"]


@pytest.mark.slow
def test_foresight_brings_policies_to_the_oracle() -> None:
    trace = Workload("sharegpt", 100, seed=3).trace(6.0)

    def mean_jct_s(policy: str, error: float | None = None) -> float:
        simulation = run(trace, error, policy=policy, objective="jct", max_num_seqs=16)
        return summarize(simulation.records).latency_s.mean

    oracle = mean_jct_s("srpt")
    # Only this is better than the oracle's order: long jobs get their first tokens early.
    assert mean_jct_s("speculative", error=0.0) < 1.15 * oracle
    with_classes = mean_jct_s("gittins", error=0.0)
    assert with_classes < 1.2 * oracle
    assert with_classes < 0.9 * mean_jct_s("gittins")


def test_predictions_are_as_wrong_as_they_are_asked_to_be() -> None:
    real = [100] * 4000
    assert make_predictions(real, 0.0, seed=1) == real
    predictions = make_predictions(real, 0.5, seed=1)
    assert predictions == make_predictions(real, 0.5, seed=1)
    assert predictions != make_predictions(real, 0.5, seed=2)
    errors = [math.log(predicted / 100) for predicted in predictions]
    assert statistics.fmean(errors) == pytest.approx(0.0, abs=0.03)
    assert statistics.stdev(errors) == pytest.approx(0.5, abs=0.03)
    assert min(make_predictions([1] * 100, 2.0, seed=0)) == 1


def test_chunks_keep_a_long_prompt_from_stalling_decodes() -> None:
    trace = [TraceJob(0.0, 10, 60), TraceJob(0.2, 2000, 2)]
    whole, chunked = (run(trace, prefill_chunk_tokens=chunk) for chunk in ("whole", 64))
    assert whole.records[0].latency_s > 2.5  # it waits out a prefill of 2 s
    assert chunked.records[0].latency_s - whole.records[0].latency_s < 60 * 0.075
    assert chunked.records[1].ttft_s > whole.records[1].ttft_s


def test_a_prompt_longer_than_an_iteration_runs_in_chunks() -> None:
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 100}
    (record,) = run([TraceJob(0.0, 450, 1)], prefill_chunk_tokens="whole", **limits).records
    # Five iterations of 100, 100, 100, 100 and 50 tokens.
    assert record.ttft_s == pytest.approx(5 * 0.010 + 0.450)


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 2048 tokens"):
        run([TraceJob(0.0, 2048, 1)])
