"""What the promotion threshold α and the quanta of skip-join MLFQ do under overload.

The threshold is the longest that a job waits before it goes back to the highest queue; ``auto`` is
100 times the SLO, 30 s. The quanta are set by their ratio and by that of the highest queue; fewer
queues mean coarser ones, for the last always covers the longest job. OPT-13B, ShareGPT lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastserve_backend.scheduler.policy_context import make_policy
from figures import console, lengths_of, new_table, number, parse, parser, save_json, save_plot
from rich.table import Table
from simulated_runs import BATCH, MAX_MODEL_LEN, OPT_13B, SWAPPING, Run, on_all_cores, scheduler

RATES = (1.5, 2.5, 4.0)
THRESHOLDS_S = (0.3, 1, 3, 10, 30, 100, 300, 10_000)
"""The paper's SLO of a token, 0.3 s, and the artifact's threshold, 3 s, among them."""
QUANTA: tuple[dict[str, Any], ...] = (
    {"quantum_ratio": 1.5},
    {"quantum_ratio": 2.0},
    {"quantum_ratio": 4.0},
    {"quantum_ratio": 8.0},
    {"quantum_ratio": 64.0},
    {"base_quantum_ms": 5.0},
    {"base_quantum_ms": 200.0},
    {"base_quantum_ms": 2000.0},
)


def main(argv: Sequence[str] | None = None) -> Table:
    args = parse(parser(__doc__, jobs=400), argv)
    rates, quanta = (RATES[1:2], QUANTA[:2]) if args.quick else (RATES, QUANTA)
    settings: list[dict[str, Any]] = [
        *({"starvation_ms": threshold_s * 1e3} for threshold_s in THRESHOLDS_S),
        *quanta,
    ]
    lengths = lengths_of(args, "sharegpt")
    points = [(rate, index) for rate in rates for index in range(len(settings))]
    # Quanta are compared at one rate only.
    points = [p for p in points if p[1] < len(THRESHOLDS_S) or p[0] == RATES[1]]
    summaries = on_all_cores(
        Run.summary,
        [
            Run(
                OPT_13B,
                lengths,
                rate,
                args.jobs,
                args.seed,
                scheduler("skip_join_mlfq", **settings[index]),
                OPT_13B.swapping(),
            )
            for rate, index in points
        ],
    )
    table = new_table(
        "Promotion threshold and quanta",
        f"OPT-13B, A100-40G, batch {BATCH}, ShareGPT lengths, {args.jobs} jobs. {SWAPPING} Times "
        "in seconds; slowdown of the longest tenth of jobs.",
        "jobs/s, setting",
        "queues",
        "norm.\nmean",
        "norm.\nP95",
        "JCT\nmean",
        "JCT\nP99",
        "slow-\ndown",
        "preempted\nper job",
    )
    for (rate, index), summary in zip(points, summaries, strict=True):
        config = scheduler("skip_join_mlfq", **settings[index])
        policy = make_policy(
            config,
            OPT_13B.latency,
            max_model_len=MAX_MODEL_LEN,
            kv_tokens=OPT_13B.kv_tokens,
        )
        name, value = next(iter(settings[index].items()))
        table.add_row(
            f"{rate:g}, {name} {value:g}",
            str(len(policy.level_sizes())),
            number(summary.normalized_latency_s.mean),
            number(summary.normalized_latency_s.p95),
            number(summary.latency_s.mean),
            number(summary.latency_s.p99),
            number(summary.longest_tenth_slowdown),
            number(summary.preemptions_per_job),
        )
    console.print(table)
    latency = {
        (rate, index): summary.normalized_latency_s
        for (rate, index), summary in zip(points, summaries, strict=True)
    }
    thresholds = range(len(THRESHOLDS_S))
    panels = {
        f"{rate:g} jobs/s": {
            "mean": (THRESHOLDS_S, [latency[rate, index].mean for index in thresholds]),
            "P95": (THRESHOLDS_S, [latency[rate, index].p95 for index in thresholds]),
        }
        for rate in rates
    }
    save_plot(args, "starvation", panels, "Promotion threshold (s)", "Normalized latency (s/token)")
    save_json(args, "starvation", panels)
    return table


if __name__ == "__main__":
    main()
