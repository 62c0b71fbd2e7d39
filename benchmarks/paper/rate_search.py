"""The largest rate that each of several systems sustains under its SLO."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fastserve_bench.report.plot import plot_sweep
from fastserve_bench.report.summary import Summary
from fastserve_bench.report.sweep import SweepPoint

from benchmarks.paper.figures import DATASETS, save_json
from benchmarks.paper.simulated_runs import OPT_13B, Run, System, on_all_cores

SLO_ITERATIONS = 10
OPT_13B_SLO_S = 0.3  # the paper's, and ten decode iterations of 30 ms
_TOLERANCE = 1.02
_QUICK_TOLERANCE = 1.4
_STEP = 2.0  # factor from rate to rate while a search looks for one that is too high
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
    """The largest rate that meets an objective, and all runs that found it."""

    rate: float
    """Infinite if no rate breaks the objective, because the jobs are so few."""
    runs: Sequence[tuple[float, Summary]]


def slo_s(system: System) -> float:
    """SLO of normalized latency: ten decode iterations."""
    return OPT_13B_SLO_S if system == OPT_13B else SLO_ITERATIONS * system.decode_s


def search_all(
    args: argparse.Namespace,
    runs: Mapping[Key, Run],
    statistics: Sequence[Callable[[Summary], float]],
    bound_s: Callable[[System], float] = slo_s,
) -> list[dict[Key, Search]]:
    """For each statistic and run, the largest rate at which it is within the system's bound.

    A search begins at the rate of its run. All its runs have the same jobs, and arrivals only
    scale. Runs for one statistic serve the next, and equal runs are run once.
    """
    tolerance = _QUICK_TOLERANCE if args.quick else _TOLERANCE
    distinct: list[Run] = []
    for run in runs.values():
        if run not in distinct:
            distinct.append(run)
    tasks = [(run, statistics, bound_s(run.system), tolerance) for run in distinct]
    found = on_all_cores(_searches, dict(enumerate(tasks)))
    return [
        {key: found[distinct.index(run)][index] for key, run in runs.items()}
        for index in range(len(statistics))
    ]


def _searches(task: tuple[Run, Sequence[Callable[[Summary], float]], float, float]) -> list[Search]:
    run, statistics, bound_s, tolerance = task
    summaries: dict[float, Summary] = {}
    return [_search(run, summaries, statistic, bound_s, tolerance) for statistic in statistics]


def _search(
    run: Run,
    summaries: dict[float, Summary],
    statistic: Callable[[Summary], float],
    bound_s: float,
    tolerance: float,
) -> Search:
    """Interpolates between a rate that meets the bound and one that breaks it.

    Args:
        summaries: of earlier runs, by rate; the search adds its own.
        tolerance: largest factor between the rate that it finds and one that is too high.
    """
    met: list[bool] = []
    while True:
        values = {rate: statistic(summary) for rate, summary in summaries.items()}
        high = min((rate for rate, value in values.items() if value > bound_s), default=math.inf)
        low = max((rate for rate in values if rate < high), default=0.0)
        if not values:
            rate = run.rate
        elif high == math.inf:
            rate = low * _STEP
            if rate > _HIGHEST_LOAD * run.rate:
                return Search(math.inf, sorted(summaries.items()))
        elif low == 0:
            rate = high / _STEP
        elif high / low <= tolerance:
            return Search(low, sorted(summaries.items()))
        elif high / low < tolerance**2 or (len(met) > 1 and met[-1] == met[-2]):
            rate = math.sqrt(low * high)
        else:
            place = math.log(bound_s / values[low]) / math.log(values[high] / values[low])
            rate = min(max(low * (high / low) ** place, low * tolerance), high / tolerance)
        rate = float(f"{rate:.3g}")
        summaries[rate] = replace(run, rate=rate).summary()
        met.append(statistic(summaries[rate]) <= bound_s)


def finite(rate: float) -> float | None:
    """The rate for JSON, which has no infinity."""
    return rate if math.isfinite(rate) else None


def ratio(rate: float, base: float) -> str:
    """The ratio for a table; a rate may be infinite."""
    return f"{rate / base:.2f}×" if math.isfinite(rate) and math.isfinite(base) else "–"


def save(
    args: argparse.Namespace,
    searches: Mapping[Line, Search],
    bound_s: Callable[[System], float] = slo_s,
    suffix: str = "",
) -> None:
    """A plot for each system and data set, and the rates as JSON."""
    for system, dataset in dict.fromkeys((line.system, line.dataset) for line in searches):
        points = [
            SweepPoint(line.label, rate, summary)
            for line, search in searches.items()
            if (line.system, line.dataset) == (system, dataset)
            for rate, summary in search.runs
        ]
        path = args.plot_dir / f"{args.figure}{suffix}_{system.model}_{dataset}.png"
        plot_sweep(points, path, slo_s=bound_s(system), title=f"{system}, {DATASETS[dataset]}")
    rates = [
        {
            "system": str(line.system),
            "dataset": line.dataset,
            "label": line.label,
            "jobs_per_s": finite(search.rate),
        }
        for line, search in searches.items()
    ]
    save_json(args, rates, suffix)
