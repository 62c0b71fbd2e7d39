"""ALISE Fig. 9: mean response time of FCFS, skip-join MLFQ, ALISE and an oracle.

OPT-13B, all with ALISE's host memory in INT8, so that only the order of the jobs differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alise import ALISE, ORACLE, alise, beside, measured, options_on_hardware
from figures import DATASETS, console, new_table, number, parse
from load_sweep import save, sweep
from prediction_errors import PERFECT
from rich.table import Table
from simulated_runs import BATCH, Run, System, mean_jct, mean_normalized

FCFS = "FCFS"
PAPER = {ALISE: "−46%"}


def main(argv: Sequence[str] | None = None) -> Table:
    args = parse(options_on_hardware(__doc__, jobs=400), argv)
    errors = measured(args)

    def ways(fcfs: Run) -> Mapping[str, Run]:
        return {
            FCFS: alise(fcfs, None, "fcfs"),
            "skip-join": alise(fcfs, None, "skip_join_mlfq"),
            ALISE: alise(fcfs, errors),
            ORACLE: alise(fcfs, PERFECT),
        }

    system = System("opt-13b", hardware=args.hardware)
    results = sweep(args, system, ways)
    save(args, "alise_fig09", results, {"mean response time": mean_jct})
    table = new_table(
        "ALISE Fig. 9: mean response time",
        f"OPT-13B, {args.hardware}, batch {BATCH}, {args.jobs} jobs (Alpaca twice as many). Load: "
        "share of what full batches finish. Response time: from arrival to the last token, "
        "seconds. In brackets: the paper's.",
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
