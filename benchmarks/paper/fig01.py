"""FastServe Fig. 1: how much of its latency a job spends waiting under FCFS, by load.

Three length distributions on OPT-13B: all jobs equal (prompt and output as long as ShareGPT's
mean), ShareGPT, Alpaca. Equal jobs also arrive at equal distances, and ShareGPT's tenth of jobs
with the shortest outputs is shown alone too. Load is the arrival rate over the rate at which full
batches finish jobs, taken from a run in which all jobs arrive at once.
"""

from __future__ import annotations

import argparse
import math
import statistics

from fastserve_bench.report.records import JobRecord
from fastserve_bench.workload import load_lengths
from rich.table import Table

from benchmarks.paper.figures import Figure, lengths_of, new_table, save_json, save_plot
from benchmarks.paper.simulated_runs import OPT_13B, RECOMPUTE, Run, on_all_cores, scheduler

LOADS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.3)
QUICK_LOADS = (0.5, 1.3)
SHORTEST = "ShareGPT, shortest tenth"
_AT_ONCE = 1e6  # jobs/s


def waiting_shares(run: Run) -> tuple[float, float]:
    """Share of latency in which no iteration ran the job: the mean over all jobs, and over the
    shortest ones."""
    records = sorted(run.simulate().records, key=lambda record: record.output_tokens)
    shares = [_waiting_share(record) for record in records]
    return statistics.fmean(shares), statistics.fmean(shares[: math.ceil(len(shares) / 10)])


def _waiting_share(record: JobRecord) -> float:
    share = record.queueing_share
    assert share is not None  # a simulation always knows it
    return share


def full_rate(run: Run) -> float:
    return run.summary().jobs_per_s


def draw(args: argparse.Namespace) -> list[Table]:
    sharegpt = lengths_of(args, "sharegpt")
    prompt, output = (round(statistics.fmean(column)) for column in zip(*sharegpt, strict=True))
    equal = load_lengths(f"equal:{prompt}:{output}")
    workloads = {
        f"equal ({prompt} + {output}), evenly": (equal, True),
        f"equal ({prompt} + {output})": (equal, False),
        "ShareGPT": (sharegpt, False),
        "Alpaca": (lengths_of(args, "alpaca"), False),
    }
    loads = QUICK_LOADS if args.quick else LOADS
    fcfs = scheduler("fcfs")

    def run(name: str, rate: float) -> Run:
        lengths, evenly = workloads[name]
        return Run(OPT_13B, lengths, rate, args.jobs, args.seed, fcfs, RECOMPUTE, evenly)

    full = on_all_cores(full_rate, {name: run(name, _AT_ONCE) for name in workloads})
    shares = on_all_cores(
        waiting_shares,
        {(name, load): run(name, full[name] * load) for name in workloads for load in loads},
    )
    share = {point: mean for point, (mean, _) in shares.items()}
    share |= {(SHORTEST, load): shares["ShareGPT", load][1] for load in loads}
    full[SHORTEST] = full["ShareGPT"]

    table = new_table(
        "Fig. 1: waiting share of latency under FCFS, by load",
        f"OPT-13B, A100-40G, batch 16, {args.jobs} jobs; Poisson arrivals but for the first row. "
        "Paper: up to 90% near full load on real lengths, almost none when all jobs are equal.",
        "lengths",
        "jobs/s\nat load 1",
        *(f"{load:g}" for load in loads),
    )
    for name in full:
        table.add_row(name, f"{full[name]:.2f}", *(f"{share[name, load]:.0%}" for load in loads))
    lines = {name: (loads, [share[name, load] for load in loads]) for name in full}
    save_plot(args, {"FCFS": lines}, "Load", "Waiting share of latency")
    save_json(args, {"loads": loads, **{name: ys for name, (_, ys) in lines.items()}})
    return [table]


FIGURE = Figure("fig01", __doc__, draw, jobs=1000)
