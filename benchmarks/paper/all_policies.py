"""Every policy on the same jobs: latency per token and completion times, light load to overload.

OPT-13B on an A100-40G, KV swapped to the host. Loads are shares of what full batches can finish.
``gittins`` begins each trace knowing nothing of its lengths. "predicted": with the errors of this
project's predictor; "foreseen": with the lengths themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from alise import measured, options
from figures import DATASETS, console, fcfs_run, new_table, number, parse
from load_sweep import save, sweep
from prediction_errors import PERFECT
from rich.table import Table
from simulated_runs import OPT_13B, SWAPPING, Run, scheduler

GITTINS = {
    "gittins, normalized latency": scheduler("gittins"),
    "gittins, JCT": scheduler("gittins", objective="jct"),
}
BLIND = {**{name: scheduler(name) for name in ("fcfs", "mlfq", "skip_join_mlfq")}, **GITTINS}
FORESIGHTED = {"speculative": scheduler("speculative"), **GITTINS}


def main(argv: Sequence[str] | None = None) -> Table:
    args = parse(options(__doc__, jobs=1000), argv)
    foresights = {"predicted": measured(args), "foreseen": PERFECT}

    def ways(fcfs: Run) -> Mapping[str, Run]:
        runs = {name: replace(fcfs, scheduler=policy) for name, policy in BLIND.items()}
        for how, errors in foresights.items():
            for name, policy in FORESIGHTED.items():
                runs[f"{name}, {how}"] = replace(fcfs, scheduler=policy, errors=errors)
        return {**runs, "srpt (oracle)": replace(fcfs, scheduler=scheduler("srpt"))}

    results = sweep(args, partial(fcfs_run, args, OPT_13B), ways)
    save(args, "all_policies", results)
    table = new_table(
        "All policies",
        f"OPT-13B, A100-40G, {args.jobs} jobs (Alpaca twice as many). {SWAPPING} Seconds.",
        "lengths, load, policy",
        "norm.\nmean",
        "norm.\nP95",
        "JCT\nmean",
        "TTFT\nP95",
        "preempted\nper job",
    )
    for (dataset, load, name), summary in results.items():
        table.add_row(
            f"{DATASETS[dataset]}, {load:g}, {name}",
            number(summary.normalized_latency_s.mean),
            number(summary.normalized_latency_s.p95),
            number(summary.latency_s.mean),
            number(summary.ttft_s.p95),
            number(summary.preemptions_per_job),
            end_section=name == "srpt (oracle)",
        )
    console.print(table)
    return table


if __name__ == "__main__":
    main()
