"""ALISE Fig. 9: mean response time of FCFS, skip-join MLFQ, ALISE and an oracle.

OPT-13B, all with ALISE's host memory in INT8, so that only the order of the jobs differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rich.table import Table

from benchmarks.paper.alise import (
    ALISE,
    ORACLE,
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
from benchmarks.paper.prediction_errors import PERFECT
from benchmarks.paper.simulated_runs import Run, mean_jct, mean_normalized

FCFS = "FCFS"
PAPER = {ALISE: "−46%"}


def main(argv: Sequence[str] | None = None) -> Table:
    args = parse(testbed_options(__doc__), argv)
    errors = measured(args)

    def ways(fcfs: Run) -> Mapping[str, Run]:
        return {
            FCFS: alise(fcfs, None, "fcfs"),
            "skip-join": alise(fcfs, None, "skip_join_mlfq"),
            ALISE: alise(fcfs, errors),
            ORACLE: alise(fcfs, PERFECT),
        }

    results = sweep(args, partial(testbed_run, args, system_of(args, "opt-13b")), ways)
    save(args, "alise_fig09", results, {"mean response time": mean_jct})
    table = new_table(
        "ALISE Fig. 9: mean response time",
        f"OPT-13B, {testbed(args)}. Load: share of what full batches finish. Response "
        "time: from arrival to the last token, seconds. In brackets: the paper's.",
        "lengths, load, policy",
        "mean\nresponse",
        "against\nFCFS",
        "norm.\nmean",
    )
    for (dataset, load, label), summary in results.items():
        change = mean_jct(summary) / mean_jct(results[dataset, load, FCFS]) - 1
        table.add_row(
            f"{DATASETS[dataset]}, {load:g}, {label}",
            number(mean_jct(summary)),
            beside(f"{change:+.0%}".replace("-", "−"), PAPER.get(label)),
            number(mean_normalized(summary)),
            end_section=label == ORACLE,
        )
    console.print(table)
    return table


if __name__ == "__main__":
    main()
