"""Every policy on the same jobs: latency per token and completion times, light load to overload.

OPT-13B on an A100-40G, KV swapped to the host. Loads are shares of what full batches can finish.
``gittins`` begins each trace knowing nothing of its lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common import (
    OPT_13B,
    SWAPPING,
    Run,
    console,
    lengths_of,
    new_table,
    number,
    on_all_cores,
    parse,
    parser,
    save_json,
    save_plot,
    scheduler,
)
from fastserve_backend.config import SchedulerSection
from fastserve_client.report import Summary
from rich.table import Table

LOADS = (0.8, 1.0, 1.5, 2.0)
DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
ALPACA_JOBS = 2  # as many as ShareGPT's: they last a sixth as long
POLICIES: Mapping[str, SchedulerSection] = {
    "fcfs": scheduler("fcfs"),
    "mlfq": scheduler("mlfq"),
    "skip_join_mlfq": scheduler("skip_join_mlfq"),
    "gittins, normalized latency": scheduler("gittins"),
    "gittins, JCT": scheduler("gittins", objective="jct"),
    "srpt (oracle)": scheduler("srpt"),
}


def main(argv: Sequence[str] | None = None) -> Table:
    args = parse(parser(__doc__, jobs=1000), argv, quick_jobs=60)
    datasets = ("alpaca",) if args.quick else tuple(DATASETS)
    loads = LOADS[-2:] if args.quick else LOADS
    keys = [(dataset, load, name) for dataset in datasets for load in loads for name in POLICIES]
    runs = []
    for dataset, load, name in keys:
        lengths = lengths_of(args, dataset)
        num_jobs = args.jobs * (ALPACA_JOBS if dataset == "alpaca" else 1)
        rate = load * OPT_13B.capacity(lengths)
        runs.append(
            Run(OPT_13B, lengths, rate, num_jobs, args.seed, POLICIES[name], OPT_13B.swapping())
        )
    results = dict(zip(keys, on_all_cores(Run.summary, runs), strict=True))
    table = _table(args.jobs, results)
    console.print(table)
    save_json(
        args,
        "all_policies",
        [
            {
                "dataset": dataset,
                "load": load,
                "policy": name,
                "normalized_mean_s": summary.normalized_latency_s.mean,
                "normalized_p95_s": summary.normalized_latency_s.p95,
                "jct_mean_s": summary.latency_s.mean,
                "ttft_p95_s": summary.ttft_s.p95,
            }
            for (dataset, load, name), summary in results.items()
        ],
    )
    save_plot(
        args,
        "all_policies",
        {
            f"{DATASETS[dataset]}, mean {what}": {
                name: (loads, [value(results[dataset, load, name]) for load in loads])
                for name in POLICIES
            }
            for dataset in datasets
            for what, value in (
                ("normalized latency", lambda summary: summary.normalized_latency_s.mean),
                ("JCT", lambda summary: summary.latency_s.mean),
            )
        },
        "load, of capacity",
        "s/token, s",
        log=True,
    )
    return table


def _table(num_jobs: int, results: Mapping[tuple[str, float, str], Summary]) -> Table:
    table = new_table(
        "All policies",
        f"OPT-13B, A100-40G, {num_jobs} jobs (Alpaca twice as many). {SWAPPING} Seconds.",
        "lengths, load, policy",
        "norm.\nmean",
        "norm.\nP95",
        "JCT\nmean",
        "TTFT\nP95",
        "preempted\nper job",
    )
    last = list(POLICIES)[-1]
    for (dataset, load, name), summary in results.items():
        table.add_row(
            f"{DATASETS[dataset]}, {load:g}, {name}",
            number(summary.normalized_latency_s.mean),
            number(summary.normalized_latency_s.p95),
            number(summary.latency_s.mean),
            number(summary.ttft_s.p95),
            number(summary.preemptions_per_job),
            end_section=name == last,
        )
    return table


if __name__ == "__main__":
    main()
