from __future__ import annotations

import math

import pytest
from fastserve_bench.workload import TraceJob, check_trace_fits, poisson_trace, timestamp_trace
from fastserve_client.errors import WorkloadError
from hypothesis import given
from hypothesis import strategies as st

_LENGTHS = [(10, 20), (300, 40), (5, 600)]
_seeds = st.integers(0, 2**63)
_rates = st.floats(1e-3, 1e3)
_counts = st.integers(1, 60)


@given(_seeds, _rates, _counts)
def test_one_seed_gives_one_sorted_trace_of_the_given_lengths(
    seed: int, rate: float, num_jobs: int
) -> None:
    trace = poisson_trace(_LENGTHS, rate, num_jobs, seed)
    assert trace == poisson_trace(_LENGTHS, rate, num_jobs, seed)
    assert len(trace) == num_jobs
    arrivals = [job.arrival_s for job in trace]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert {(job.prompt_tokens, job.output_tokens) for job in trace} <= set(_LENGTHS)


@given(_seeds, _rates, _rates, _counts)
def test_another_rate_only_scales_the_arrivals(
    seed: int, rate: float, other: float, num_jobs: int
) -> None:
    trace = poisson_trace(_LENGTHS, rate, num_jobs, seed)
    scaled = poisson_trace(_LENGTHS, other, num_jobs, seed)
    for job, same_job in zip(trace, scaled, strict=True):
        assert same_job.arrival_s * other == pytest.approx(job.arrival_s * rate)
        assert (job.prompt_tokens, job.output_tokens) == (
            same_job.prompt_tokens,
            same_job.output_tokens,
        )


@given(_seeds, _counts, _counts)
def test_a_longer_trace_begins_with_the_shorter(seed: int, num_jobs: int, more: int) -> None:
    shorter = poisson_trace(_LENGTHS, 1.0, num_jobs, seed)
    assert poisson_trace(_LENGTHS, 1.0, num_jobs + more, seed)[:num_jobs] == shorter


def test_seeds_differ() -> None:
    assert poisson_trace(_LENGTHS, 1.0, 5, seed=0) != poisson_trace(_LENGTHS, 1.0, 5, seed=1)


def test_gaps_are_exponential_and_lengths_drawn_evenly() -> None:
    count = 20_000
    trace = poisson_trace(_LENGTHS, 4.0, count, seed=0)
    gaps = [
        b.arrival_s - a.arrival_s
        for a, b in zip([TraceJob(0.0, 1, 1), *trace[:-1]], trace, strict=True)
    ]
    # Standard errors are 0.7% of the mean gap and 0.3 percentage points of the shares.
    assert sum(gaps) / count == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / count == pytest.approx(math.exp(-1), abs=0.015)
    assert sum(job.prompt_tokens == 5 for job in trace) / count == pytest.approx(1 / 3, abs=0.015)


def test_timestamps_are_sorted_and_begin_at_zero() -> None:
    assert timestamp_trace([107.0, 105.0, 105.5], _LENGTHS, None, 3) == [
        TraceJob(0.0, 300, 40),
        TraceJob(0.5, 5, 600),
        TraceJob(2.0, 10, 20),
    ]


@given(st.lists(st.integers(0, 10**15), min_size=2, max_size=30, unique=True), _rates)
def test_a_rate_rescales_the_mean_gap_of_timestamps(times_ns: list[int], rate: float) -> None:
    times = [time_ns / 1e9 for time_ns in times_ns]
    trace = timestamp_trace(times, [(1, 1)] * len(times), rate, len(times))
    assert trace[0].arrival_s == 0
    assert (trace[-1].arrival_s / (len(times) - 1)) * rate == pytest.approx(1)


@pytest.mark.parametrize("times", [[3.0], [3.0, 3.0]])
def test_jobs_that_arrive_at_once_have_no_rate(times: list[float]) -> None:
    lengths = _LENGTHS[: len(times)]
    trace = timestamp_trace(times, lengths, None, len(times))
    assert [job.arrival_s for job in trace] == [0.0 for _ in times]
    with pytest.raises(
        WorkloadError, match=r"^rate: got 2 for jobs that all arrive at once; needs"
    ):
        timestamp_trace(times, lengths, 2, len(times))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_out_of_range(rate: float) -> None:
    message = f"^rate: got {rate:g}; must be a finite number of jobs/s above 0$"
    with pytest.raises(WorkloadError, match=message):
        poisson_trace(_LENGTHS, rate, 1, seed=0)
    with pytest.raises(WorkloadError, match=message):
        timestamp_trace([0.0, 1.0, 2.0], _LENGTHS, rate, 3)


@pytest.mark.parametrize("num_jobs", [0, -3])
def test_traces_have_a_job(num_jobs: int) -> None:
    with pytest.raises(WorkloadError, match=f"^num_jobs: got {num_jobs}; must be at least 1$"):
        poisson_trace(_LENGTHS, 1.0, num_jobs, seed=0)
    with pytest.raises(WorkloadError, match=f"^num_jobs: got {num_jobs}; must be at least 1$"):
        timestamp_trace([0.0, 1.0, 2.0], _LENGTHS, None, num_jobs)


def test_negative_seed_and_no_lengths() -> None:
    with pytest.raises(WorkloadError, match=r"^seed: got -1; must be at least 0$"):
        poisson_trace(_LENGTHS, 1.0, 1, seed=-1)
    with pytest.raises(WorkloadError, match=r"^lengths: got none; "):
        poisson_trace([], 1.0, 1, seed=0)


def test_a_job_over_the_models_limit_is_named() -> None:
    trace = [TraceJob(0.0, 1500, 548), TraceJob(0.1, 1500, 549), TraceJob(0.2, 9000, 1)]
    check_trace_fits(trace[:1], 2048)
    with pytest.raises(WorkloadError) as error:
        check_trace_fits(trace, 2048)
    assert str(error.value) == (
        "trace: got job 2 with 1500 prompt + 549 output tokens; "
        "must be at most 2048 together (max_model_len)"
    )
