"""The trace replay of the benchmarks stops when asked to."""

from __future__ import annotations

import pytest
from engine_ranks import rank_hold
from fastserve_backend import LLM
from fastserve_bench.workload import TraceJob, poisson_trace

from benchmarks.replay import TooSlow, on_the_engine
from benchmarks.simulator_fidelity import RunLatency

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_all_jobs_are_recorded(llm: LLM) -> None:
    trace = poisson_trace([(5, 7), (20, 3)], rate=200, num_jobs=6, seed=1)
    records = on_the_engine(llm.engine, trace)
    assert [(one.prompt_tokens, one.output_tokens) for one in records] == [
        (job.prompt_tokens, job.output_tokens) for job in trace
    ]
    # Latencies count from the scheduled arrival, however late the job was submitted.
    since_s = [one.arrival_s - records[0].arrival_s for one in records]
    assert since_s == pytest.approx([job.arrival_s - trace[0].arrival_s for job in trace], abs=1e-6)


def test_the_simulator_takes_what_the_engine_predicts_by(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's timings are recorded while the engine's own correction goes on."""
    predictions, profile = llm.engine.profile, llm.engine.profile.model
    predictions.replace(profile)  # forgets what it has learned, which may be at its limit
    before = predictions.decode_ratio
    monkeypatch.setattr(predictions, "observe", predictions.observe)  # as it is afterwards
    run = RunLatency(predictions)
    on_the_engine(llm.engine, poisson_trace([(5, 7), (20, 3)], rate=200, num_jobs=6, seed=1))
    assert run.profile is profile
    assert llm.engine.profile is predictions
    assert predictions.decode_ratio != before
    assert run.decode_s(9) == run.ratio(False) * profile.decode_s(9)
    assert run.prefill_s(9) == run.ratio(True) * profile.prefill_s(9)


def test_a_run_that_takes_too_long_is_given_up(llm: LLM) -> None:
    jobs = [TraceJob(0.0, 5, 300) for _ in range(4)]
    cancelled = llm.engine.counters.finished["cancelled"]
    with rank_hold(llm) as hold:
        hold.stop()
        with pytest.raises(TooSlow, match="jobs had not ended"):
            on_the_engine(llm.engine, [*jobs, TraceJob(100.0, 5, 300)], deadline_s=0.05)
    # Cancelled jobs free their memory: the next job waits for none of them.
    assert len(on_the_engine(llm.engine, [TraceJob(0.0, 5, 3)])) == 1
    assert llm.engine.counters.finished["cancelled"] == cancelled + len(jobs)
