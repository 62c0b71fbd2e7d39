"""FastServe Fig. 14: mean normalized latency while the ratio of input to output tokens varies.

ShareGPT lengths, prompts and outputs scaled so that the mean total stays (OPT-13B). Capacity moves
with the ratio, since a token costs less in a prefill than in a decode; the rate moves with it.
"""

from __future__ import annotations

import argparse

from fastserve_bench.workload import AUTHORS_LIMITS, scale_ratio
from rich.table import Table

from benchmarks.paper.figures import Figure, lengths_of, new_table, number, save_json, save_plot
from benchmarks.paper.simulated_runs import (
    BATCH,
    OPT_13B,
    SWAPPING,
    Run,
    mean_normalized,
    on_all_cores,
    scheduler,
)

BEST = "skip_join_mlfq"
BASELINES = {"fcfs": "8.9", "mlfq": "1.87", "fixed_priority": "13.9"}
"""Most latency in the paper, × skip-join's."""
RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LOADS = (1.0, 1.5)


def draw(args: argparse.Namespace) -> list[Table]:
    ratios, loads = (RATIOS[::6], LOADS[1:]) if args.quick else (RATIOS, LOADS)
    sharegpt = lengths_of(args, "sharegpt")
    runs = {}
    for ratio in ratios:
        lengths = scale_ratio(sharegpt, ratio, AUTHORS_LIMITS)
        for load in loads:
            rate = load * OPT_13B.capacity(lengths)
            for policy in (*BASELINES, BEST):
                own = args.jobs, args.seed, scheduler(policy), OPT_13B.swapping()
                runs[load, ratio, policy] = Run(OPT_13B, lengths, rate, *own)
    summaries = on_all_cores(Run.summary, runs)
    latency = {key: mean_normalized(summary) for key, summary in summaries.items()}

    table = new_table(
        "Fig. 14: mean normalized latency, s/token",
        f"OPT-13B, A100-40G, batch {BATCH}, {args.jobs} jobs. {SWAPPING} Load is the rate over "
        "what full batches finish. Paper, at most: "
        + ", ".join(f"{policy} {times}×" for policy, times in BASELINES.items())
        + " of skip-join, which is never worse.",
        "load",
        "input/\noutput",
        "jobs/s",
        "skip-join",
        *BASELINES,
        *(f"{policy[:5]}\n/ skip" for policy in BASELINES),
    )
    for load in loads:
        for ratio in ratios:
            best = latency[load, ratio, BEST]
            others = [latency[load, ratio, policy] for policy in BASELINES]
            table.add_row(
                f"{load:g}",
                f"{ratio:g}",
                number(runs[load, ratio, BEST].rate),
                number(best),
                *map(number, others),
                *(f"{other / best:.2f}×" for other in others),
            )
    panels = {
        f"Load {load:g}": {
            policy: (ratios, [latency[load, ratio, policy] for ratio in ratios])
            for policy in (*BASELINES, BEST)
        }
        for load in loads
    }
    save_plot(args, panels, "Input / output tokens", "Normalized latency (s/token)", log=True)
    save_json(args, panels)
    return [table]


FIGURE = Figure("fig14", __doc__, draw)
