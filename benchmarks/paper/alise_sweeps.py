"""ALISE Fig. 8 and 9: strategies for preempted jobs' KV, and policies, at several loads.

OPT-13B, speculative with the measured prediction errors unless said otherwise. Fig. 8: 'swap' is
ALISE's, host memory in INT8, swapped by estimated wait time (EWT); 'defer' begins no job that might
not fit, 'recompute' drops KV and computes it again. Fig. 9: FCFS, skip-join MLFQ, ALISE and an
oracle, all with ALISE's host memory, so that only the order of the jobs differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

from fastserve_bench.report.summary import Summary
from rich.table import Table

from benchmarks.paper.alise import (
    ALISE,
    ORACLE,
    add_options,
    alise,
    beside,
    measured,
    system_of,
    testbed,
    testbed_run,
)
from benchmarks.paper.figures import (
    DATASETS,
    Figure,
    datasets_of,
    new_table,
    number,
    save_json,
    save_plot,
)
from benchmarks.paper.prediction_errors import PERFECT
from benchmarks.paper.simulated_runs import Run, mean_jct, mean_normalized, on_all_cores

LOADS = (0.8, 1.0, 1.5, 2.0)
"""Loads: rates over what full batches finish."""
SWAP, FCFS = "swap", "FCFS"
STRATEGIES = {"defer": "1.8×", "recompute": "2.8×"}
"""The ways that ALISE is compared with, and how far the paper's ALISE is ahead of them."""

Results = Mapping[tuple[str, float, str], Summary]
"""(data set, load, label) → result."""


def draw_fig08(args: argparse.Namespace) -> list[Table]:
    errors = measured(args)

    def ways(fcfs: Run) -> Mapping[str, Run]:
        others = {strategy: alise(fcfs, errors, strategy=strategy) for strategy in STRATEGIES}
        return {**others, SWAP: alise(fcfs, errors)}

    results = sweep(args, ways, "mean normalized latency", mean_normalized)
    table = new_table(
        "ALISE Fig. 8: strategies for preempted jobs' KV",
        f"OPT-13B, {testbed(args)}, speculative with the measured prediction errors. Load: share "
        "of what full batches finish. Seconds. In brackets: by how much the paper's ALISE is "
        "ahead.",
        *("lengths, load, strategy", "norm.\nmean", "norm.\nP95", "JCT\nmean", "mean over\nswap's"),
    )
    for (dataset, load, label), summary in results.items():
        ahead = mean_normalized(summary) / mean_normalized(results[dataset, load, SWAP])
        table.add_row(
            f"{DATASETS[dataset]}, {load:g}, {label}",
            number(mean_normalized(summary)),
            number(summary.normalized_latency_s.p95),
            number(mean_jct(summary)),
            beside(f"{ahead:.2f}×", STRATEGIES.get(label)),
            end_section=label == SWAP,
        )
    return [table]


def draw_fig09(args: argparse.Namespace) -> list[Table]:
    errors = measured(args)

    def ways(fcfs: Run) -> Mapping[str, Run]:
        return {
            FCFS: alise(fcfs, None, "fcfs"),
            "skip-join": alise(fcfs, None, "skip_join_mlfq"),
            ALISE: alise(fcfs, errors),
            ORACLE: alise(fcfs, PERFECT),
        }

    results = sweep(args, ways, "mean response time", mean_jct)
    table = new_table(
        "ALISE Fig. 9: mean response time",
        f"OPT-13B, {testbed(args)}. Load: share of what full batches finish. Response "
        "time: from arrival to the last token, seconds. In brackets: the paper's.",
        *("lengths, load, policy", "mean\nresponse", "against\nFCFS", "norm.\nmean"),
    )
    for (dataset, load, label), summary in results.items():
        change = mean_jct(summary) / mean_jct(results[dataset, load, FCFS]) - 1
        table.add_row(
            f"{DATASETS[dataset]}, {load:g}, {label}",
            number(mean_jct(summary)),
            beside(f"{change:+.0%}".replace("-", "−"), "−46%" if label == ALISE else None),
            number(mean_normalized(summary)),
            end_section=label == ORACLE,
        )
    return [table]


def sweep(
    args: argparse.Namespace,
    ways: Callable[[Run], Mapping[str, Run]],
    what: str,
    value: Callable[[Summary], float],
) -> Results:
    """Runs all, and saves a plot of one value over load, and all values.

    Args:
        ways: what is compared, by label, made from a run of FCFS at load 1.
        what: names the value.
    """
    system = system_of(args, "opt-13b")
    runs = {
        (dataset, load, label): replace(run, rate=load * run.rate)
        for dataset in datasets_of(args)
        for load in (LOADS[-1:] if args.quick else LOADS)
        for label, run in ways(testbed_run(args, system, dataset)).items()
    }
    results = on_all_cores(Run.summary, runs)
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for (dataset, load, label), summary in results.items():
        panel = panels.setdefault(f"{DATASETS[dataset]}, {what}", {})
        loads, ys = panel.setdefault(label, ([], []))
        loads.append(load)
        ys.append(value(summary))
    save_plot(args, panels, "load, of capacity", "s/token, s", log=True)
    save_json(
        args,
        [
            {
                "dataset": dataset,
                "load": load,
                "label": label,
                "normalized_mean_s": mean_normalized(summary),
                "normalized_p95_s": summary.normalized_latency_s.p95,
                "jct_mean_s": mean_jct(summary),
                "ttft_p95_s": summary.ttft_s.p95,
            }
            for (dataset, load, label), summary in results.items()
        ],
    )
    return results


FIGURES = (
    Figure("alise_fig08", __doc__, draw_fig08, add_options=add_options),
    Figure("alise_fig09", __doc__, draw_fig09, add_options=add_options),
)
