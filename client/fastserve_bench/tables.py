"""The results of a load test as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from fastserve_bench.groups import GroupSummary, group_summaries, jain_index
from fastserve_bench.outcome import LoadOutcome
from fastserve_bench.points import Point, WithinObjectives, sweep_points
from fastserve_bench.report.summary import Distribution
from fastserve_bench.report.table import MISSING, format_number, labelled_table, latency_table
from fastserve_bench.workload import ServiceClass

_CAPTION = (
    "done: jobs/s that finished; SLO met: share of all jobs sent; sent late: P99 of the time from "
    "a job's arrival to its sending."
)
_PERCENTILES = ("P50", "P95", "P99")
_GROUPS_CAPTION = (
    "Milliseconds, all repeats together. kept: share of the jobs sent with this objective; good: "
    "finished jobs that kept all their objectives."
)

_GROUPS: Mapping[str, Callable[[ServiceClass], str]] = {
    "class": lambda service: service.name,
    "tenant": lambda service: service.tenant,
}


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
    rows = [(point.label, point.offered, point.outcomes) for point in points]
    yield from group_tables(rows, load_header)


def group_tables(
    rows: Sequence[tuple[str, float, Sequence[LoadOutcome]]], load_header: str
) -> Iterator[Table]:
    """A table of classes and one of tenants, where there are any.

    Args:
        rows: what is compared, the offered load, and its runs.
    """
    for kind, key_of in _GROUPS.items():
        groups = [group_summaries(outcomes, key_of) for _, _, outcomes in rows]
        if any(len(one) > 1 or any(one) for one in groups):
            loads = [(label, offered) for label, offered, _ in rows]
            yield _groups_table(loads, groups, load_header, kind)


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


def _groups_table(
    loads: Sequence[tuple[str, float]],
    groups: Sequence[Mapping[str, GroupSummary]],
    load_header: str,
    kind: str,
) -> Table:
    """A row for each class, or tenant, under each load."""
    rows = []
    for (label, offered), summaries in zip(loads, groups, strict=True):
        jain = format_number(jain_index(summaries))
        for name, one in summaries.items():
            numbers = [
                f"{offered:g}",
                escape(name) or MISSING,
                f"{one.num_jobs}",
                f"{one.num_failed}",
                _percent(one.ttft_kept),
                _percent(one.tpot_kept),
                format_number(one.goodput_jobs_per_s),
                *map(format_number, _percentiles_ms(one.ttft_s)),
                *map(format_number, _percentiles_ms(one.tpot_s)),
                format_number(one.tokens_per_s),
            ]
            rows.append((label, [*numbers, jain] if kind == "tenant" else numbers))
    headers = [
        load_header, kind, "jobs\nsent", "errors", "TTFT\nkept", "TPOT\nkept", "good\njobs/s",
        *(f"{metric}\n{statistic}" for metric in ("TTFT", "TPOT") for statistic in _PERCENTILES),
        "tokens\n/s",
    ]  # fmt: skip
    if kind == "tenant":
        headers.append("Jain's\nindex")
    return labelled_table(headers, rows, caption=_GROUPS_CAPTION)


def _percentiles_ms(times_s: Distribution | None) -> Sequence[float | None]:
    if times_s is None:
        return [None] * len(_PERCENTILES)
    return [1e3 * time_s for time_s in (times_s.p50, times_s.p95, times_s.p99)]


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


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
