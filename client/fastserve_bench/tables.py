"""The results of a load test as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from fastserve_bench.points import Point, WithinObjectives, sweep_points
from fastserve_bench.report.table import format_number, labelled_table, latency_table

_CAPTION = (
    "done: jobs/s that finished; SLO met: share of all jobs sent; sent late: P99 of the time from "
    "a job's arrival to its sending."
)


def result_tables(points: Sequence[Point], load_header: str) -> Iterator[Table]:
    """Two tables: throughput and errors, then latencies. A row is a server under a load."""
    yield _throughput_table(points, load_header)
    finished = sweep_points(points)
    if finished:
        yield latency_table(
            finished,
            {"norm.": lambda s: s.normalized_latency_s, "JCT": lambda s: s.latency_s},
            load_header,
        )
        yield latency_table(
            finished, {"TTFT": lambda s: s.ttft_s, "TPOT": lambda s: s.tpot_s}, load_header
        )


def _throughput_table(points: Sequence[Point], load_header: str) -> Table:
    rows = []
    for point in points:
        summary, late_s = point.summary, point.send_lateness_p99_s
        numbers = [
            f"{point.offered:g}",
            format_number(None if summary is None else summary.jobs_per_s),
            format_number(None if summary is None else summary.output_tokens_per_s),
            str(point.num_jobs),
            str(point.num_failed),
            f"{point.attainment:.0%}",
            format_number(None if summary is None else summary.preemptions_per_job),
            format_number(late_s if late_s is None else late_s * 1e3),
        ]
        rows.append((point.label, numbers))
    return labelled_table(
        (
            load_header,
            "jobs/s\ndone",
            "output\ntokens/s",
            "jobs\nsent",
            "errors",
            "SLO\nmet",
            "pre-\nempted",
            "sent late\nms",
        ),
        rows,
        caption=_CAPTION,
    )


def error_lines(points: Sequence[Point]) -> Iterator[str]:
    """The errors: their number by kind, and the first message of each kind."""
    for point in points:
        failures = [failure for outcome in point.outcomes for failure in outcome.failures]
        for kind, count in point.failures_by_kind.items():
            example = next(failure for failure in failures if failure.kind.value == kind)
            yield f"{point.label}, {point.load}: {count} {kind}: {example.message}"


def objectives_table(within: Mapping[str, WithinObjectives], slo_s: float) -> Table:
    """The highest rates within the objectives. ``slo_s`` is that of normalized latency."""
    return labelled_table(
        ("mean within SLO", "P95 within SLO", "P95 goodput"),
        [
            (
                label,
                [_highest(one, rates.measured) for one in (rates.mean, rates.p95, rates.goodput)],
            )
            for label, rates in within.items()
        ],
        title=f"Highest rate within the objectives, jobs/s (SLO {slo_s:g} s/token)",
        lines=False,
    )


def _highest(rate: float, measured: float) -> str:
    if math.isinf(rate):
        return f"> {measured:g}"
    return "not even the lowest" if rate == 0 else format_number(rate)
