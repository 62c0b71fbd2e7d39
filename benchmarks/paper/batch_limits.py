"""Does preemption still win without the authors' limit of 16 jobs in an iteration?

OPT-13B with limits of 16, 64, 128 and none, so that KV memory bounds the batch. A batch has to be
in device memory, so here there is nothing but device memory, and what does not fit is recomputed.
For each limit: the largest rates under the SLO of 0.3 s a token, then all at 1.25 times FCFS's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from common import (
    DATASETS,
    OPT_13B,
    RECOMPUTE,
    Run,
    Search,
    add_dataset,
    console,
    datasets_of,
    jobs_of,
    largest_rate,
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
from fastserve_client.report.summary import Summary, summarize
from rich.table import Table

SLO_S = 0.3
LIMITS = {"16": 16, "64": 64, "128": 128, "memory": 1024}
"""1024: more jobs than have a block each."""
SEARCHED = ("fcfs", "skip_join_mlfq")
COMPARED = ("fcfs", "skip_join_mlfq", "srpt")
OVERLOAD = 1.25
UNLIMITED_RATE = 100.0  # jobs/s
TOLERANCE = 1.03
QUICK_TOLERANCE = 1.5


def meets(summary: Summary) -> bool:
    return summary.normalized_latency_s.mean <= SLO_S


def search(task: tuple[Run, float]) -> Search:
    return largest_rate(task[0], meets, task[1])


def with_recomputed(run: Run) -> tuple[Summary, int]:
    simulation = run.simulate()
    return summarize(simulation.records), simulation.counters.recomputed_jobs


def main(argv: Sequence[str] | None = None) -> Table:
    options = parser(__doc__, jobs=400)
    add_dataset(options)
    args = parse(options, argv, quick_jobs=50)
    datasets = datasets_of(args)
    limits = ("16", "memory") if args.quick else tuple(LIMITS)

    def run(dataset: str, limit: str, policy: str) -> Run:
        lengths = lengths_of(args, dataset)
        rate = OPT_13B.capacity(lengths)
        section = scheduler(policy, LIMITS[limit])
        return Run(OPT_13B, lengths, rate, jobs_of(args, dataset), args.seed, section, RECOMPUTE)

    searched = [
        (dataset, limit, policy) for dataset in datasets for limit in limits for policy in SEARCHED
    ]
    tolerance = QUICK_TOLERANCE if args.quick else TOLERANCE
    found = on_all_cores(search, [(run(*key), tolerance) for key in searched])
    largest = {key: result.rate for key, result in zip(searched, found, strict=True)}

    compared = [
        (dataset, limit, policy) for dataset in datasets for limit in limits for policy in COMPARED
    ]
    rates = [rate_of_comparison(largest, dataset, limit) for dataset, limit, _ in compared]
    results = on_all_cores(
        with_recomputed,
        [replace(run(*key), rate=rate) for key, rate in zip(compared, rates, strict=True)],
    )
    table = new_table(
        "Batch limits: the largest rate under 0.3 s/token, and policies at one rate above FCFS's",
        f"OPT-13B, A100-40G, device memory only, recompute, {args.jobs} jobs (Alpaca twice as "
        "many). Times in seconds; slowdown of the longest tenth of jobs; recomputed: per job.",
        "lengths, limit, policy",
        "largest\njobs/s",
        "compared\nat jobs/s",
        "norm.\nmean",
        "norm.\nP95",
        "JCT\nmean",
        "slow-\ndown",
        "recom-\nputed",
    )
    for key, rate, (summary, recomputed) in zip(compared, rates, results, strict=True):
        dataset, limit, policy = key
        table.add_row(
            f"{DATASETS[dataset]}, {limit}, {policy}",
            number(largest.get(key)),
            number(rate),
            number(summary.normalized_latency_s.mean),
            number(summary.normalized_latency_s.p95),
            number(summary.latency_s.mean),
            number(summary.longest_tenth_slowdown),
            f"{recomputed / summary.num_jobs:.2f}",
            end_section=policy == COMPARED[-1],
        )
    console.print(table)
    panels = {
        DATASETS[dataset]: {
            policy: (range(len(limits)), [largest[dataset, limit, policy] for limit in limits])
            for policy in SEARCHED
        }
        for dataset in datasets
    }
    label = f"Most jobs in an iteration: {', '.join(limits)}"
    save_plot(args, "batch_limits", panels, label, "Largest rate (jobs/s)")
    save_json(
        args,
        "batch_limits",
        [
            {"dataset": dataset, "limit": limit, "policy": policy, "jobs_per_s": finite(rate)}
            for (dataset, limit, policy), rate in largest.items()
        ],
    )
    return table


def rate_of_comparison(
    largest: Mapping[tuple[str, str, str], float], dataset: str, limit: str
) -> float:
    """FCFS's largest rate and a quarter more; with too few jobs for a limit, a rate far above."""
    rate = largest[dataset, limit, "fcfs"]
    return OVERLOAD * rate if math.isfinite(rate) else UNLIMITED_RATE


def finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


if __name__ == "__main__":
    main()
