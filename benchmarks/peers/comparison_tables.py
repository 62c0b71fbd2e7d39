"""The reports of `fastserve bench` as Markdown tables, with nothing left out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
"""The JSON that `fastserve bench --output` writes."""

Figure = tuple[str, str, str, float]
"""Heading, where the number is in a run's summary, and the factor that makes its unit."""


def speed_table(reports: Mapping[str, Report]) -> str:
    """Tokens per second of closed loops: output tokens, or prompt tokens where answers are one
    token.

    Args:
        reports: by the loop that was run. In each report all jobs of a server have the same
            lengths.
    """
    labels = list(dict.fromkeys(label for report in reports.values() for label in _labels(report)))
    rows = []
    for name, report in reports.items():
        points = {point["label"]: point for point in report["points"]}
        rows.append([name, *(_speed(points[x]) if x in points else "not run" for x in labels)])
    return markdown(["tokens/s", *labels], rows)


def sweep_table(report: Report) -> str:
    """Latencies at each rate, a row for each server at each rate."""
    header = [
        "jobs/s",
        "server",
        "mean, ms a token",
        "P95",
        "TTFT, ms",
        "within SLO",
        "jobs/s done",
    ]
    points = sorted(report["points"], key=lambda point: point["rate"])
    return markdown(header, [_sweep_row(point) for point in points])


def objectives_table(report: Report) -> str:
    """The highest rates within the objective, interpolated between measured ones."""
    rates = [point["rate"] for point in report["points"]]
    rows = [
        [label, *(_highest(within[name], rates) for name in ("mean", "p95", "goodput"))]
        for label, within in report["within_objectives"].items()
    ]
    return markdown(["jobs/s", "mean within SLO", "P95 within SLO", "95% of jobs within"], rows)


def summaries(report: Report, label: str) -> list[Mapping[str, Any]]:
    """Summaries of a server's runs at the report's only load, in order of their seeds.

    Raises:
        RuntimeError: jobs of a run failed.
    """
    (point,) = (point for point in report["points"] if point["label"] == label)
    if point["failures_by_kind"]:
        raise RuntimeError(f"{label}: jobs failed: {point['failures_by_kind']}")
    return [run["summary"] for run in point["runs"]]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _labels(report: Report) -> list[str]:
    return [point["label"] for point in report["points"]]


def _speed(point: Mapping[str, Any]) -> str:
    def tokens_per_s(run: Mapping[str, Any]) -> float:
        record = run["records"][0]
        if record["output_tokens"] == 1:
            return float(record["prompt_tokens"] / run["summary"]["ttft_s"]["mean"])
        return float(run["summary"]["output_tokens_per_s"])

    return _median(point, tokens_per_s)


def _sweep_row(point: Mapping[str, Any]) -> list[str]:
    return [
        f"{point['rate']:g}",
        point["label"],
        _median(point, lambda run: run["summary"]["normalized_latency_s"]["mean"] * 1e3),
        _median(point, lambda run: run["summary"]["normalized_latency_s"]["p95"] * 1e3),
        _median(point, lambda run: run["summary"]["ttft_s"]["mean"] * 1e3),
        f"{point['attainment']:.0%}",
        _median(point, lambda run: run["summary"]["jobs_per_s"]),
    ]


def _median(point: Mapping[str, Any], number: Callable[[Mapping[str, Any]], float]) -> str:
    """The median over the runs in which jobs finished; with several runs also the least and the
    most."""
    failed = sum(point["failures_by_kind"].values())
    values = [number(run) for run in point["runs"] if run["summary"] is not None]
    if not values:
        return f"{failed} failed"
    text = spread(values)
    return f"{text}, {failed} failed" if failed else text


def pick(summary: Report, figure: Figure) -> float:
    _, name, statistic, factor = figure
    return float(summary[name][statistic]) * factor


def spread(values: Sequence[float]) -> str:
    """The median; of several values also the least and the most, in brackets."""
    middle, least, most = map(short_number, (statistics.median(values), min(values), max(values)))
    return f"{middle} [{least}, {most}]" if len(values) > 1 else middle


def times_as_fast(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How many times as fast ours is: the median of the repeats' ratios, with the least and the
    most. Below 1 it is marked as a loss.

    Args:
        ours, theirs: speeds of the same repeats; for times give theirs first.
    """
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return spread(ratios) + (" (loss)" if statistics.median(ratios) < 1 else "")


def short_number(value: float) -> str:
    """Three digits; a whole number keeps all."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _highest(rate: float | None, measured: Sequence[float]) -> str:
    if rate is None:
        return f"> {max(measured):g}"
    return f"< {min(measured):g}" if rate == 0 else f"{rate:.2f}"
