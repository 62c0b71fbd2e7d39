"""The largest rate that each of several systems sustains under its SLO."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from common import DATASETS, OPT_13B, Run, Search, System, largest_rate, on_all_cores, save_json
from fastserve_client.report.plot import plot_sweep
from fastserve_client.report.summary import Summary
from fastserve_client.report.sweep import SweepPoint

SLO_ITERATIONS = 10
OPT_13B_SLO_S = 0.3  # the paper's, and ten decode iterations of 30 ms
_TOLERANCE = 1.02
_QUICK_TOLERANCE = 1.4


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a figure: latency over rate, and one bisection."""

    system: System
    dataset: str
    label: str


def slo_s(system: System) -> float:
    """Of normalized latency: ten decode iterations."""
    return OPT_13B_SLO_S if system == OPT_13B else SLO_ITERATIONS * system.decode_s


def search_all(
    args: argparse.Namespace,
    runs: Mapping[Line, Run],
    statistic: Callable[[Summary], float],
    bound_s: Callable[[System], float] = slo_s,
) -> dict[Line, Search]:
    """For each line the largest rate, to 2%, at which the statistic is within the bound.

    The search begins at the rate of the line's run.
    """
    tolerance = _QUICK_TOLERANCE if args.quick else _TOLERANCE
    tasks = [
        (run, partial(_meets, statistic, bound_s(line.system)), tolerance)
        for line, run in runs.items()
    ]
    return dict(zip(runs, on_all_cores(_search, tasks), strict=True))


def _meets(statistic: Callable[[Summary], float], bound_s: float, summary: Summary) -> bool:
    return statistic(summary) <= bound_s


def _search(task: tuple[Run, Callable[[Summary], bool], float]) -> Search:
    return largest_rate(*task)


def ratio(rate: float, base: float) -> str:
    """For a table; a rate may be infinite."""
    return f"{rate / base:.2f}×" if math.isfinite(rate) and math.isfinite(base) else "–"


def save(
    args: argparse.Namespace,
    name: str,
    searches: Mapping[Line, Search],
    bound_s: Callable[[System], float] = slo_s,
) -> None:
    """A plot for each system and data set, and the rates as JSON."""
    for system, dataset in dict.fromkeys((line.system, line.dataset) for line in searches):
        points = [
            SweepPoint(line.label, rate, summary)
            for line, search in searches.items()
            if (line.system, line.dataset) == (system, dataset)
            for rate, summary in search.runs
        ]
        path = args.plot_dir / f"{name}_{system.model}_{dataset}.png"
        plot_sweep(points, path, slo_s=bound_s(system), title=f"{system}, {DATASETS[dataset]}")
    save_json(
        args,
        name,
        [
            {
                "system": str(line.system),
                "dataset": line.dataset,
                "label": line.label,
                "jobs_per_s": None if math.isinf(search.rate) else search.rate,
            }
            for line, search in searches.items()
        ],
    )
