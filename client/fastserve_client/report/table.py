"""A sweep as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich import box
from rich.table import Table

from fastserve_client.report.summary import Distribution, Summary
from fastserve_client.report.sweep import SweepPoint

# So few columns, and so narrow, that a policy's name leaves them room in 100 characters; the JSON
# of the sweep has all numbers.
_COLUMNS = (
    "jobs/s",
    "jobs/s\ndone",
    "tokens\n/s",
    "norm.\nmean",
    "norm.\nP95",
    "TTFT\nP95",
    "TPOT\nP95",
    "JCT\nmean",
    "queue-\ning",
    "slow-\ndown",
    "pre-\nempted",
)
_CAPTION = (
    "Times in seconds. norm.: latency per output token; queueing: share of the latencies; "
    "slowdown: of the longest 10% of jobs; preempted: times per job."
)
MISSING = "–"


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """One row a point, in their order; a line parts the labels."""
    table = Table(box=box.HORIZONTALS, padding=0, caption=_CAPTION, caption_justify="left")
    table.add_column("\nlabel", no_wrap=True)
    for header in _COLUMNS:
        table.add_column(header, justify="right", no_wrap=True)
    for index, point in enumerate(points):
        summary = point.summary
        numbers = (
            summary.jobs_per_s,
            summary.output_tokens_per_s,
            summary.normalized_latency_s.mean,
            summary.normalized_latency_s.p95,
            summary.ttft_s.p95,
            None if summary.tpot_s is None else summary.tpot_s.p95,
            summary.latency_s.mean,
        )
        table.add_row(
            point.label,
            f"{point.rate:g}",
            *map(format_number, numbers),
            _formatted(summary.queueing_share, ".0%"),
            format_number(summary.longest_tenth_slowdown),
            _formatted(summary.preemptions_per_job, ".2f"),
            end_section=_ends_section(points, index),
        )
    return table


Metric: TypeAlias = Callable[[Summary], Distribution | None]


def latency_table(
    points: Sequence[SweepPoint], metrics: Mapping[str, Metric], load_header: str = "jobs/s"
) -> Table:
    """Mean and percentiles in milliseconds, one row a point in their order.

    Args:
        metrics: Seconds, each by its name in the header; two of them fit 100 characters.
    """
    table = Table(box=box.HORIZONTALS, padding=0, caption="Milliseconds.", caption_justify="left")
    table.add_column("\nlabel", no_wrap=True)
    table.add_column(f"\n{load_header}", justify="right", no_wrap=True)
    for name in metrics:
        for statistic in ("mean", "P50", "P95", "P99"):
            table.add_column(f"{name}\n{statistic}", justify="right", no_wrap=True)
    for index, point in enumerate(points):
        times = [metric(point.summary) for metric in metrics.values()]
        table.add_row(
            point.label,
            f"{point.rate:g}",
            *(format_number(value) for time in times for value in _values(time)),
            end_section=_ends_section(points, index),
        )
    return table


def _values(times: Distribution | None) -> Sequence[float | None]:
    if times is None:
        return (None,) * 4
    return [1e3 * time_s for time_s in (times.mean, times.p50, times.p95, times.p99)]


def _ends_section(points: Sequence[SweepPoint], index: int) -> bool:
    return index + 1 < len(points) and points[index + 1].label != points[index].label


def _formatted(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def format_number(value: float | None) -> str:
    """At least three digits, of which at most four are decimals."""
    if value is None:
        return MISSING
    # Rounding first, so that 99.96 has as many digits as 100.
    rounded = float(f"{value:.3g}")
    decimals = next((d for d, bound in enumerate((100, 10, 1, 0.1)) if rounded >= bound), 4)
    return f"{value:,.{decimals}f}"
