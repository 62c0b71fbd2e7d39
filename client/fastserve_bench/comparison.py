"""Compares servers with the first one: ratios of their figures under the same load."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from fastserve_bench.points import Point
from fastserve_bench.report.summary import Summary
from fastserve_bench.report.table import MISSING, labelled_table

_COMPARED: Mapping[str, Callable[[Summary], float | None]] = {
    "norm. mean": lambda summary: summary.normalized_latency_s.mean,
    "norm. P95": lambda summary: summary.normalized_latency_s.p95,
    "TTFT P95": lambda summary: summary.ttft_s.p95,
    "TPOT mean": lambda summary: None if summary.tpot_s is None else summary.tpot_s.mean,
    "JCT mean": lambda summary: summary.latency_s.mean,
    "JCT P95": lambda summary: summary.latency_s.p95,
    "tokens/s": lambda summary: summary.output_tokens_per_s,
}


@dataclass(frozen=True, slots=True)
class Ratios:
    """One server's figures over the first one's, under one load."""

    label: str
    offered: float
    values: Mapping[str, float | None]
    """By name: the median, over the repeats, of the ratio of two runs with the same seed."""


def compare(points: Sequence[Point]) -> list[Ratios]:
    """Ratios for all labels but the first. A load without two runs to compare has ``None``."""
    if not points:
        return []
    base = {point.load: point for point in points if point.label == points[0].label}
    return [
        Ratios(point.label, point.offered, _ratios(point, base[point.load]))
        for point in points
        if point.label != points[0].label and point.load in base
    ]


def _ratios(point: Point, base: Point) -> dict[str, float | None]:
    pairs = list(_pairs(point, base))
    found: dict[str, float | None] = {}
    for name, number in _COMPARED.items():
        ratios = []
        for one, other in pairs:
            over, under = number(one), number(other)
            if over is not None and under:
                ratios.append(over / under)
        found[name] = statistics.median(ratios) if ratios else None
    return found


def _pairs(point: Point, base: Point) -> Iterator[tuple[Summary, Summary]]:
    """Summaries of both servers for each repeat in which both finished all jobs.

    A server that lost half of its jobs would be faster with the others.
    """
    ours, others = _complete(point), _complete(base)
    for repeat in ours.keys() & others.keys():
        yield ours[repeat], others[repeat]


def _complete(point: Point) -> dict[int, Summary]:
    """Summaries by repeat, of runs in which every job finished."""
    return {
        run.repeat: run.summary
        for run in point.runs
        if run.summary is not None and not run.outcome.failures and not run.outcome.interrupted
    }


def comparison_table(ratios: Sequence[Ratios], base: str, load_header: str) -> Table:
    """One row for each server and load."""
    rows = []
    for row in ratios:
        cells = (MISSING if value is None else f"{value:.2f}" for value in row.values.values())
        rows.append((row.label, [f"{row.offered:g}", *cells]))
    return labelled_table(
        [load_header, *(name.replace(" ", "\n") for name in _COMPARED)],
        rows,
        title=f"Ratios to {base}, same seed (below 1 is faster; tokens/s: above 1)",
        caption="Only of runs without errors.",
    )
