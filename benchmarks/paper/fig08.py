"""FastServe Fig. 8: most KV memory in use, MLFQ against FCFS, with memory without end.

OPT-2.7B, ShareGPT prompts, outputs cut to 20 tokens. MLFQ prefills newcomers at once and so keeps
the KV of all unfinished jobs; FCFS keeps that of one batch.
"""

from __future__ import annotations

import argparse

from rich.table import Table

from benchmarks.paper.figures import Figure, lengths_of, new_table, save_json, save_plot
from benchmarks.paper.simulated_runs import (
    BLOCK_SIZE,
    Run,
    System,
    kv_cache,
    on_all_cores,
    scheduler,
)

SYSTEM = System("opt-2.7b")
MAX_OUTPUT_TOKENS = 20
POLICIES = ("fcfs", "mlfq", "skip_join_mlfq")
LOADS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
QUICK_LOADS = (0.5, 2.0)
_TOKENS_OF_ANY_JOB = 1024 + MAX_OUTPUT_TOKENS


def peak_gb(run: Run) -> float:
    blocks = run.simulate().counters.peak_blocks
    return blocks * SYSTEM.config.kv_bytes_per_block(BLOCK_SIZE) / 1e9


def draw(args: argparse.Namespace) -> list[Table]:
    loads = QUICK_LOADS if args.quick else LOADS
    lengths = [(p, min(o, MAX_OUTPUT_TOKENS)) for p, o in lengths_of(args, "sharegpt")]
    capacity = SYSTEM.capacity(lengths)
    blocks = args.jobs * -(-_TOKENS_OF_ANY_JOB // BLOCK_SIZE)
    enough = kv_cache(strategy="recompute", device_blocks=blocks)

    def run(load: float, policy: str) -> Run:
        rate = load * capacity
        return Run(SYSTEM, lengths, rate, args.jobs, args.seed, scheduler(policy), enough)

    peak = on_all_cores(
        peak_gb, {(load, policy): run(load, policy) for load in loads for policy in POLICIES}
    )

    table = new_table(
        "Fig. 8: peak KV memory, GB",
        f"OPT-2.7B, A100-40G, batch 16, outputs of at most {MAX_OUTPUT_TOKENS} tokens, {args.jobs} "
        f"jobs; load 1 is {capacity:.1f} jobs/s. Paper: MLFQ up to 7 times FCFS.",
        "load",
        *POLICIES,
        "mlfq / fcfs",
    )
    for load in loads:
        row = [peak[load, policy] for policy in POLICIES]
        table.add_row(f"{load:g}", *(f"{gb:.2f}" for gb in row), f"{row[1] / row[0]:.1f}")
    lines = {policy: (loads, [peak[load, policy] for load in loads]) for policy in POLICIES}
    save_plot(args, {"OPT-2.7B": lines}, "Load", "Peak KV memory (GB)")
    save_json(args, {"loads": loads, **{policy: ys for policy, (_, ys) in lines.items()}})
    return [table]


FIGURE = Figure("fig08", __doc__, draw, jobs=1000)
