"""FastServe Fig. 15: what becomes of preempted jobs' KV when device memory is short.

(a) Normalized latency against rate for four strategies, OPT-13B on an A100-40G with 56 GiB of host
memory. (b) The share of its latency that a job waits for its KV, and what crosses the link.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastserve_bench.report.summary import summarize
from rich.table import Table

from benchmarks.paper.figures import Figure, lengths_of, new_table, number, save_json, save_plot
from benchmarks.paper.simulated_runs import BATCH, OPT_13B, Run, on_all_cores, scheduler

LOADS = (0.6, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
"""Loads: rates over what full batches finish."""
QUICK_LOADS = (1.5,)
SETTINGS: dict[str, dict[str, object]] = {
    "defer": {"strategy": "defer"},
    "recompute": {"strategy": "recompute"},
    "reactive": {"strategy": "reactive"},
    "proactive": {},
    "proactive, no write-back": {"write_back": False},
    "proactive, not incremental": {"incremental": False},
}
PLOTTED = ("defer", "recompute", "reactive", "proactive")


@dataclass(frozen=True, slots=True)
class Outcome:
    normalized_mean_s: float
    normalized_p95_s: float
    jct_mean_s: float
    stall_share: float
    """Share of all jobs' latencies in which a job would have run but for its KV."""
    out_gb: float
    in_gb: float
    avoided_gb: float
    recomputed: int


def outcome(run: Run) -> Outcome:
    simulation = run.simulate()
    records, counters = simulation.records, simulation.counters
    summary = summarize(records)
    return Outcome(
        summary.normalized_latency_s.mean,
        summary.normalized_latency_s.p95,
        summary.latency_s.mean,
        sum(one.swap_stall_s or 0.0 for one in records) / sum(one.latency_s for one in records),
        counters.swap_out_bytes / 1e9,
        counters.swap_in_bytes / 1e9,
        counters.swap_avoided_bytes / 1e9,
        counters.recomputed_jobs,
    )


def draw(args: argparse.Namespace) -> list[Table]:
    lengths = lengths_of(args, "sharegpt")
    capacity = OPT_13B.capacity(lengths)
    rates = [load * capacity for load in (QUICK_LOADS if args.quick else LOADS)]
    policy = scheduler("skip_join_mlfq")

    def run(rate: float, setting: Mapping[str, object]) -> Run:
        kv_cache = OPT_13B.swapping(**setting)
        return Run(OPT_13B, lengths, rate, args.jobs, args.seed, policy, kv_cache)

    results = on_all_cores(
        outcome,
        {(rate, name): run(rate, keys) for rate in rates for name, keys in SETTINGS.items()},
    )
    table = new_table(
        "Fig. 15: strategies for preempted jobs' KV",
        f"OPT-13B, A100-40G, batch {BATCH}, skip-join MLFQ, ShareGPT lengths, {args.jobs} jobs, "
        f"56 GiB of host memory; full batches finish {capacity:.2f} jobs/s. Times in seconds. "
        "'blocked': share of the latencies in which a job waits for its KV and would run "
        "otherwise; the paper's claim is below 5%. 'avoided': the host had it already.",
        "jobs/s, strategy",
        "norm.\nmean",
        "norm.\nP95",
        "JCT\nmean",
        "blocked",
        "out\nGB",
        "in\nGB",
        "avoided\nGB",
        "recom-\nputed",
    )
    for (rate, name), one in results.items():
        table.add_row(
            f"{rate:.2f}, {name}",
            number(one.normalized_mean_s),
            number(one.normalized_p95_s),
            number(one.jct_mean_s),
            f"{one.stall_share:.2%}",
            number(one.out_gb),
            number(one.in_gb),
            number(one.avoided_gb),
            str(one.recomputed),
            end_section=name == list(SETTINGS)[-1],
        )

    def lines(field: str) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        return {
            name: (rates, [getattr(results[rate, name], field) for rate in rates])
            for name in PLOTTED
        }

    panels = {"Mean": lines("normalized_mean_s"), "P95": lines("normalized_p95_s")}
    save_plot(args, panels, "Rate (jobs/s)", "Normalized latency (s/token)", log=True)
    save_json(
        args,
        [
            {"rate": rate, "strategy": name}
            | {field: getattr(one, field) for field in Outcome.__slots__}
            for (rate, name), one in results.items()
        ],
    )
    return [table]


FIGURE = Figure("fig15", __doc__, draw)
