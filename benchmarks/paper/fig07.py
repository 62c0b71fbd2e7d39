"""FastServe Fig. 7: three jobs that arrive at once, one at a time, under four policies.

Quanta are 1, 2, 4, 8 s. The paper prints the mean latencies, not the sizes of the jobs. The sizes
here come nearest of all in steps of 0.5 s (prefill up to 6 s, up to 6 decode iterations of 1 s).
"""

from __future__ import annotations

import argparse
import statistics

from fastserve_backend.engine.loop_setup import KVMemory
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.simulation.simulator import simulate
from fastserve_bench.workload import TraceJob
from rich.table import Table

from benchmarks.paper.figures import Figure, new_table, number, save_json, save_plot
from benchmarks.paper.simulated_runs import RECOMPUTE, scheduler

PAPER = {"fcfs": 4.23, "mlfq": 5.0, "skip_join_mlfq": 3.3, "srpt": 3.0}
MAX_MODEL_LEN = 16
ENOUGH = KVMemory(num_blocks=3, num_host_blocks=0, block_bytes=1, link=Link(0.0, 0.0))
JOBS = [TraceJob(0.0, 4, 2), TraceJob(0.0, 10, 2), TraceJob(0.0, 2, 1)]


class ThreeJobTimes(LatencyModel):
    """Prefill 0.25 s a token, decode 1 s: prefills of 1, 2.5 and 0.5 s."""

    def iteration_s(self, load: IterationLoad) -> float:
        return 0.25 * (load.num_tokens - load.num_decodes) + 1.0 * load.num_decodes


def draw(args: argparse.Namespace) -> list[Table]:
    table = new_table(
        "Fig. 7: latency of three jobs that arrive at once, batch 1",
        "Job 1: prefill 1, one decode of 1. Job 2: 2.5 and 1. Job 3: 0.5, no decode.",
        "policy",
        "job 1",
        "job 2",
        "job 3",
        "mean",
        "paper's mean",
    )
    means = {}
    for policy, paper in PAPER.items():
        simulation = simulate(
            JOBS,
            scheduler(policy, max_num_seqs=1, base_quantum_ms=1000.0),
            RECOMPUTE,
            ThreeJobTimes(),
            ENOUGH,
            max_model_len=MAX_MODEL_LEN,
        )
        latencies = [record.latency_s for record in simulation.records]
        means[policy] = statistics.fmean(latencies)
        table.add_row(policy, *map(number, latencies), number(means[policy]), number(paper))
    lines = {
        "here": (range(len(PAPER)), list(means.values())),
        "paper": (range(len(PAPER)), list(PAPER.values())),
    }
    save_plot(args, {"Three jobs": lines}, ", ".join(PAPER), "Mean latency")
    save_json(args, means)
    return [table]


FIGURE = Figure("fig07", __doc__, draw, jobs=len(JOBS))
