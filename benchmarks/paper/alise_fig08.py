"""ALISE Fig. 8: what becomes of preempted jobs' KV, under the speculative policy.

OPT-13B. 'swap' is ALISE's: host memory in INT8, swapped by estimated wait time (EWT). 'defer'
begins no job that might not fit, 'recompute' drops KV and computes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rich.table import Table

from benchmarks.paper.alise import (
    alise,
    beside,
    measured,
    system_of,
    testbed,
    testbed_options,
    testbed_run,
)
from benchmarks.paper.figures import DATASETS, console, new_table, number, parse
from benchmarks.paper.load_sweep import save, sweep
from benchmarks.paper.simulated_runs import Run, mean_normalized

SWAP = "swap"
PAPER = {"defer": "1.8×", "recompute": "2.8×"}


def main(argv: Sequence[str] | None = None) -> Table:
    args = parse(testbed_options(__doc__), argv)
    errors = measured(args)

    def ways(fcfs: Run) -> Mapping[str, Run]:
        others = {strategy: alise(fcfs, errors, strategy=strategy) for strategy in PAPER}
        return {**others, SWAP: alise(fcfs, errors)}

    results = sweep(args, partial(testbed_run, args, system_of(args, "opt-13b")), ways)
    save(args, "alise_fig08", results, {"mean normalized latency": mean_normalized})
    table = new_table(
        "ALISE Fig. 8: strategies for preempted jobs' KV",
        f"OPT-13B, {testbed(args)}, speculative with the measured prediction errors. Load: share "
        "of what full batches finish. Seconds. In brackets: by how much the paper's ALISE is "
        "ahead.",
        "lengths, load, strategy",
        "norm.\nmean",
        "norm.\nP95",
        "JCT\nmean",
        "mean over\nswap's",
    )
    for (dataset, load, label), summary in results.items():
        ahead = mean_normalized(summary) / mean_normalized(results[dataset, load, SWAP])
        table.add_row(
            f"{DATASETS[dataset]}, {load:g}, {label}",
            number(mean_normalized(summary)),
            number(summary.normalized_latency_s.p95),
            number(summary.latency_s.mean),
            beside(f"{ahead:.2f}×", PAPER.get(label)),
            end_section=label == SWAP,
        )
    console.print(table)
    return table


if __name__ == "__main__":
    main()
