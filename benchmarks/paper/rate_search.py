"""The largest rate that each of several systems sustains under its SLO."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fastserve_client.report.plot import plot_sweep
from fastserve_client.report.summary import Summary
from fastserve_client.report.sweep import SweepPoint
from figures import DATASETS, save_json
from simulated_runs import OPT_13B, Run, System, on_all_cores

SLO_ITERATIONS = 10
OPT_13B_SLO_S = 0.3  # the paper's, and ten decode iterations of 30 ms
_TOLERANCE = 1.02
_QUICK_TOLERANCE = 1.4
_STEP = 2.0  # factor between rates while a search looks for one that is too high
# With a fixed number of jobs latency stops growing once they all arrive practically at once.
_HIGHEST_LOAD = 20.0

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a figure: latency over rate, and one bisection."""

    system: System
    dataset: str
    label: str


@dataclass(frozen=True, slots=True)
class Search:
    """The largest rate that meets an objective, and all that was run to find it."""

    rate: float
    """Infinite if no rate breaks the objective with so few jobs."""
    runs: Sequence[tuple[float, Summary]]


def slo_s(system: System) -> float:
    """Of normalized latency: ten decode iterations."""
    return OPT_13B_SLO_S if system == OPT_13B else SLO_ITERATIONS * system.decode_s


def search_all(
    args: argparse.Namespace,
    runs: Mapping[Key, Run],
    statistic: Callable[[Summary], float],
    bound_s: Callable[[System], float] = slo_s,
    tolerance: float = _TOLERANCE,
) -> dict[Key, Search]:
    """For each run the largest rate at which the statistic is within its system's bound.

    The search begins at the rate of the run. All runs of one have the same jobs, and arrivals that
    only scale.

    Args:
        tolerance: factor between the rate that is found and one that is too high.
    """
    if args.quick:
        tolerance = _QUICK_TOLERANCE
    tasks = [(run, statistic, bound_s(run.system), tolerance) for run in runs.values()]
    return dict(zip(runs, on_all_cores(_search, tasks), strict=True))


def _search(task: tuple[Run, Callable[[Summary], float], float, float]) -> Search:
    """Bisects."""
    run, statistic, bound_s, tolerance = task
    low, high, rate = 0.0, math.inf, float(f"{run.rate:.3g}")
    runs: list[tuple[float, Summary]] = []
    while low == 0 or high / low > tolerance:
        if rate > _HIGHEST_LOAD * run.rate:
            return Search(math.inf, runs)
        summary = replace(run, rate=rate).summary()
        runs.append((rate, summary))
        if statistic(summary) <= bound_s:
            low = rate
        else:
            high = rate
        if low == 0:
            rate = high / _STEP
        else:
            rate = low * _STEP if high == math.inf else math.sqrt(low * high)
        rate = float(f"{rate:.3g}")
    return Search(low, runs)


def finite(rate: float) -> float | None:
    """For JSON, which has no infinity."""
    return rate if math.isfinite(rate) else None


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
                "jobs_per_s": finite(search.rate),
            }
            for line, search in searches.items()
        ],
    )
