"""Several ways to serve the same jobs, side by side at several loads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from fastserve_bench.report.summary import Summary

from benchmarks.paper.figures import DATASETS, datasets_of, save_json, save_plot
from benchmarks.paper.simulated_runs import Run, mean_jct, mean_normalized, on_all_cores

Results: TypeAlias = Mapping[tuple[str, float, str], Summary]
"""(data set, load, label) → what came out."""
LOADS = (0.8, 1.0, 1.5, 2.0)
"""Rates over what full batches finish."""
LATENCIES: Mapping[str, Callable[[Summary], float]] = {
    "mean normalized latency": mean_normalized,
    "mean JCT": mean_jct,
}


def sweep(
    args: argparse.Namespace,
    fcfs: Callable[[str], Run],
    ways: Callable[[Run], Mapping[str, Run]],
) -> Results:
    """Runs them all.

    Args:
        fcfs: for a data set the run of FCFS at load 1.
        ways: what is compared, by label, made from a run of FCFS.
    """
    runs = {
        (dataset, load, label): replace(run, rate=load * run.rate)
        for dataset in datasets_of(args)
        for load in (LOADS[-1:] if args.quick else LOADS)
        for label, run in ways(fcfs(dataset)).items()
    }
    return dict(zip(runs, on_all_cores(Run.summary, runs.values()), strict=True))


def save(
    args: argparse.Namespace,
    name: str,
    results: Results,
    values: Mapping[str, Callable[[Summary], float]] = LATENCIES,
) -> None:
    """A panel for each data set and value, over load; all values as JSON."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for (dataset, load, label), summary in results.items():
        for what, value in values.items():
            panel = panels.setdefault(f"{DATASETS[dataset]}, {what}", {})
            loads, ys = panel.setdefault(label, ([], []))
            loads.append(load)
            ys.append(value(summary))
    save_plot(args, name, panels, "load, of capacity", "s/token, s", log=True)
    save_json(
        args,
        name,
        [
            {
                "dataset": dataset,
                "load": load,
                "label": label,
                "normalized_mean_s": summary.normalized_latency_s.mean,
                "normalized_p95_s": summary.normalized_latency_s.p95,
                "jct_mean_s": summary.latency_s.mean,
                "ttft_p95_s": summary.ttft_s.p95,
            }
            for (dataset, load, label), summary in results.items()
        ],
    )
