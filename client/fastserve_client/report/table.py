"""A sweep as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

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
_MISSING = "–"


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
            *map(_number, numbers),
            f"{summary.queueing_share:.0%}",
            _number(summary.longest_tenth_slowdown),
            f"{summary.preemptions_per_job:.2f}",
            end_section=index + 1 < len(points) and points[index + 1].label != point.label,
        )
    return table


def _number(value: float | None) -> str:
    """At least three digits, of which at most four are decimals."""
    if value is None:
        return _MISSING
    # Rounding first, so that 99.96 has as many digits as 100.
    rounded = float(f"{value:.3g}")
    decimals = next((d for d, bound in enumerate((100, 10, 1, 0.1)) if rounded >= bound), 4)
    return f"{value:,.{decimals}f}"
