"""A sweep as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fastserve_bench.report.summary import Distribution, Summary
from fastserve_bench.report.sweep import SweepPoint

# Few and narrow columns, so that they fit 100 characters beside a policy's name. The JSON of the
# sweep has all numbers.
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


def labelled_table(
    headers: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    *,
    title: str | None = None,
    caption: str | None = None,
    lines: bool = True,
) -> Table:
    """A table for ``print_tables``: each row has a label and numbers. In 80 columns labels are
    wrapped, and no number is cut.

    Args:
        headers: Headers of the numbers. Some may have two lines.
        rows: Labels, which are shown as they are, and their numbers.
        lines: True draws a line between rows whose labels differ.
    """
    table = Table(
        box=box.HORIZONTALS,
        padding=0,
        title=title and escape(title),
        title_justify="left",
        caption=caption and escape(caption),
        caption_justify="left",
    )
    height = max(header.count("\n") for header in headers)
    table.add_column("\n" * height + "label", overflow="fold")
    for header in headers:
        table.add_column(
            "\n" * (height - header.count("\n")) + header, justify="right", no_wrap=True
        )
    for index, (label, numbers) in enumerate(rows):
        ends = lines and index + 1 < len(rows) and rows[index + 1][0] != label
        table.add_row(Text(label), *numbers, end_section=ends)
    return table


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """A row for each point, in their order, and a line between labels."""
    return labelled_table(
        _COLUMNS, [(point.label, _numbers(point)) for point in points], caption=_CAPTION
    )


def _numbers(point: SweepPoint) -> list[str]:
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
    return [
        f"{point.rate:g}",
        *map(format_number, numbers),
        _formatted(summary.queueing_share, ".0%"),
        format_number(summary.longest_tenth_slowdown),
        _formatted(summary.preemptions_per_job, ".2f"),
    ]


Metric: TypeAlias = Callable[[Summary], Distribution | None]


def latency_table(
    points: Sequence[SweepPoint], metrics: Mapping[str, Metric], load_header: str = "jobs/s"
) -> Table:
    """Mean and percentiles in milliseconds, a row for each point in their order.

    Args:
        metrics: Values in seconds, by their names in the header. Two fit 100 characters.
    """
    statistics = ("mean", "P50", "P95", "P99")
    rows = []
    for point in points:
        times = [metric(point.summary) for metric in metrics.values()]
        numbers = (format_number(value) for time in times for value in _values(time))
        rows.append((point.label, [f"{point.rate:g}", *numbers]))
    return labelled_table(
        [load_header, *(f"{name}\n{statistic}" for name in metrics for statistic in statistics)],
        rows,
        caption="Milliseconds.",
    )


def _values(times: Distribution | None) -> Sequence[float | None]:
    if times is None:
        return (None,) * 4
    return [1e3 * time_s for time_s in (times.mean, times.p50, times.p95, times.p99)]


def _formatted(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def format_number(value: float | None) -> str:
    """The number with at least three digits, and at most four decimals."""
    if value is None:
        return MISSING
    # Round first, so that 99.96 has as many digits as 100.
    rounded = float(f"{value:.3g}")
    decimals = next((d for d, bound in enumerate((100, 10, 1, 0.1)) if rounded >= bound), 4)
    return f"{value:,.{decimals}f}"
