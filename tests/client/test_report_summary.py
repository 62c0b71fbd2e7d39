from __future__ import annotations

from dataclasses import replace

import pytest
from fastserve_bench.report.objectives import Objectives, attainment
from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.summary import Distribution, summarize
from fastserve_client.errors import WorkloadError
from hypothesis import given
from hypothesis import strategies as st
from report_records import record


def test_times_of_one_job() -> None:
    job = JobRecord(
        arrival_s=10.0,
        first_scheduled_s=11.0,
        first_token_s=12.0,
        last_token_s=18.0,
        prompt_tokens=7,
        output_tokens=4,
        num_preemptions=2,
        executed_s=6.0,
    )
    assert job.latency_s == 8.0
    assert job.normalized_latency_s == 2.0
    assert job.ttft_s == 2.0
    assert job.tpot_s == 2.0
    assert job.queueing_s == 2.0
    assert job.queueing_share == 0.25


def test_a_single_token_has_no_time_per_token() -> None:
    assert record(output_tokens=1).tpot_s is None


def test_executing_longer_than_the_latency_is_no_negative_queueing() -> None:
    # Two processes have two clocks, and an iteration may outlast its job's last token.
    assert record(latency_s=4.0, executed_s=4.5).queueing_share == 0.0
    assert summarize([record(latency_s=4.0, executed_s=4.5)]).queueing_share == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_token_s": 0.25}, "times of a job must ascend"),
        ({"last_token_s": float("nan")}, "times of a job must ascend"),
        ({"arrival_s": 1.0, "first_scheduled_s": 1.0, "last_token_s": 1.0}, "must ascend"),
        ({"output_tokens": 0}, "at least one token"),
        ({"prompt_tokens": 0}, "at least one token"),
        ({"executed_s": -0.1}, "must not be negative"),
        ({"executed_s": float("nan")}, "must not be negative"),
        ({"alone_s": 0.0}, "must not be negative"),
    ],
)
def test_impossible_records_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(record(), **change)  # type: ignore[arg-type]


def test_summary_by_hand() -> None:
    summary = summarize(
        [
            record(0.0, ttft_s=1.0, latency_s=4.0, output_tokens=4, executed_s=2.0),
            record(1.0, ttft_s=3.0, latency_s=9.0, output_tokens=3, executed_s=3.0),
            record(2.0, ttft_s=2.0, latency_s=2.0, output_tokens=1, num_preemptions=3),
        ]
    )
    assert summary.num_jobs == 3
    assert summary.duration_s == 10.0
    assert summary.jobs_per_s == pytest.approx(0.3)
    assert summary.output_tokens_per_s == pytest.approx(0.8)
    # 1, 3 and 2 s/token; P95 of three lies 0.9 of the way from the second to the third.
    assert summary.normalized_latency_s == Distribution(
        mean=2.0, p50=2.0, p95=pytest.approx(2.9), p99=pytest.approx(2.98)
    )
    assert summary.ttft_s == Distribution(
        mean=2.0, p50=2.0, p95=pytest.approx(2.9), p99=pytest.approx(2.98)
    )
    # 3/3 and 6/2: the third job has one token only.
    assert summary.tpot_s == Distribution(
        mean=2.0, p50=2.0, p95=pytest.approx(2.9), p99=pytest.approx(2.98)
    )
    assert summary.latency_s == Distribution(
        mean=5.0, p50=4.0, p95=pytest.approx(8.5), p99=pytest.approx(8.9)
    )
    assert summary.queueing_share == pytest.approx((2 + 6 + 0) / 15)
    assert summary.longest_tenth_slowdown is None
    assert summary.preemptions_per_job == 1.0


def test_slowdown_of_the_tenth_that_takes_longest_alone() -> None:
    # 11 jobs: a tenth, rounded up, is two of them. The slowest by far is short alone.
    short = [record(latency_s=100.0, alone_s=1.0 + i / 100) for i in range(9)]
    longest = [record(latency_s=8.0, alone_s=4.0), record(latency_s=20.0, alone_s=5.0)]
    records = [longest[0], *short, longest[1]]
    assert summarize(records).longest_tenth_slowdown == pytest.approx((2.0 + 4.0) / 2)


def test_one_unknown_latency_alone_leaves_the_slowdown_unknown() -> None:
    assert summarize([record(alone_s=1.0), record()]).longest_tenth_slowdown is None


def test_single_tokens_have_no_tpot() -> None:
    records = [record(output_tokens=1, ttft_s=4.0)]
    assert summarize(records).tpot_s is None
    assert attainment(records, Objectives(ttft_s=4.0, tpot_s=0.0)) == 1.0


def test_attainment_needs_both_objectives() -> None:
    records = [
        record(ttft_s=1.0, latency_s=4.0, output_tokens=4),  # TPOT 1
        record(ttft_s=1.0, latency_s=7.0, output_tokens=4),  # TPOT 2
        record(ttft_s=2.0, latency_s=5.0, output_tokens=4),  # TPOT 1
        record(ttft_s=2.0, latency_s=8.0, output_tokens=4),  # TPOT 2
    ]
    assert attainment(records, Objectives(ttft_s=1.0, tpot_s=1.0)) == 0.25
    assert attainment(records, Objectives(ttft_s=2.0, tpot_s=1.0)) == 0.5
    assert attainment(records, Objectives(ttft_s=2.0, tpot_s=2.0)) == 1.0
    assert attainment(records, Objectives(ttft_s=0.9, tpot_s=2.0)) == 0.0


def test_no_records_have_no_report() -> None:
    with pytest.raises(WorkloadError, match=r"^records: got none; a report needs at least one"):
        summarize([])
    with pytest.raises(WorkloadError, match=r"^records: got none; "):
        attainment([], Objectives(ttft_s=1.0))


@st.composite
def _records(draw: st.DrawFn) -> JobRecord:
    ttft_s = draw(st.floats(1e-3, 100))
    return record(
        arrival_s=draw(st.floats(0, 1000)),
        ttft_s=ttft_s,
        latency_s=ttft_s + draw(st.floats(0, 100)),
        output_tokens=draw(st.integers(1, 50)),
        executed_s=draw(st.floats(0, 300)),
        num_preemptions=draw(st.integers(0, 9)),
        alone_s=draw(st.floats(0.01, 100)),
    )


_runs = st.lists(_records(), min_size=1, max_size=30)


@given(_runs)
def test_shares_and_percentiles_are_in_their_order(records: list[JobRecord]) -> None:
    summary = summarize(records)
    assert 0 <= summary.queueing_share <= 1
    for times in (summary.normalized_latency_s, summary.ttft_s, summary.latency_s):
        assert times.p50 <= times.p95 <= times.p99


@given(_runs, st.randoms(use_true_random=False))
def test_the_order_of_records_means_nothing(records: list[JobRecord], random: object) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    summary, other = summarize(records), summarize(shuffled)
    assert other.normalized_latency_s.mean == pytest.approx(summary.normalized_latency_s.mean)
    assert other.latency_s.p99 == pytest.approx(summary.latency_s.p99)
    assert other.duration_s == summary.duration_s


@given(_runs, st.floats(0.01, 100))
def test_a_slower_clock_scales_times_and_leaves_shares(
    records: list[JobRecord], factor: float
) -> None:
    scaled = [
        replace(
            job,
            arrival_s=job.arrival_s * factor,
            first_scheduled_s=job.first_scheduled_s * factor,
            first_token_s=job.first_token_s * factor,
            last_token_s=job.last_token_s * factor,
            executed_s=job.executed_s * factor,
        )
        for job in records
    ]
    summary, other = summarize(records), summarize(scaled)
    assert other.duration_s == pytest.approx(summary.duration_s * factor)
    assert other.latency_s.p50 == pytest.approx(summary.latency_s.p50 * factor)
    assert other.output_tokens_per_s == pytest.approx(summary.output_tokens_per_s / factor)
    assert other.queueing_share == pytest.approx(summary.queueing_share, abs=1e-6)


@given(_runs, st.floats(0, 100), st.floats(0, 10), st.floats(0, 10))
def test_easier_objectives_are_met_by_no_fewer_jobs(
    records: list[JobRecord], ttft_slo_s: float, tpot_slo_s: float, easier_s: float
) -> None:
    strict = attainment(records, Objectives(ttft_s=ttft_slo_s, tpot_s=tpot_slo_s))
    easier = Objectives(ttft_s=ttft_slo_s + easier_s, tpot_s=tpot_slo_s + easier_s)
    easy = attainment(records, easier)
    assert 0 <= strict <= easy <= 1
