"""The shipped scheduler where jobs queue: beside FCFS on the same engine, and vLLM's CPU build;
started by ``vllm_cpu.sh queues``.

Two workloads, each at 1.3 times what FCFS serves of it when all jobs are there at once. All servers
have as many seats as the shipped ``max_num_seqs: auto`` finds for this machine. They stay up and
take turns as in ``compare.py``, with other prompts, lengths and arrivals in each repeat.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.compare import VLLM, Comparison, add_common_arguments, run_comparison
from benchmarks.peers.comparison_tables import (
    Figure,
    Report,
    markdown,
    pick,
    spread,
    summaries,
)
from benchmarks.peers.vllm_server import ALL_CPUS

DEFAULT, FCFS = "as shipped", "fcfs"
LOAD = 1.3
WORKLOADS: Mapping[str, Mapping[str, str | float]] = {
    "ShareGPT × 0.2": {
        "dataset": "sharegpt",
        "scale": 0.2,
        "max-prompt-tokens": 400,
        "max-output-tokens": 200,
        "num-jobs": 800,
    },
    "code × 0.25, bursts": {
        "dataset": "code",
        "scale": 0.25,
        "arrivals": "bursts",
        "max-prompt-tokens": 1500,
        "num-jobs": 200,
    },
}
_AT_ONCE = 1000.0
"""Jobs per second: so many that all are there before the first has ended."""
_CAPACITY_JOBS, _QUICK_JOBS = 400, 8
"""Jobs: several batches, so that the last one, when seats are empty, counts for little."""

FIGURES: tuple[Figure, ...] = (
    ("mean, ms a token", "normalized_latency_s", "mean", 1e3),
    ("P95", "normalized_latency_s", "p95", 1e3),
    ("P99", "normalized_latency_s", "p99", 1e3),
    ("first token P95, s", "ttft_s", "p95", 1.0),
    ("JCT mean, s", "latency_s", "mean", 1.0),
    ("JCT P99, s", "latency_s", "p99", 1.0),
)


def measure(comparison: Comparison, arguments: argparse.Namespace) -> str:
    """Makes all measurements; returns Markdown.

    Raises:
        RuntimeError: a server takes processor time while idle, or a run failed.
    """
    comparison.start_ours(DEFAULT, "float32", max_num_seqs="auto")
    comparison.start_ours(FCFS, "float32", max_num_seqs="auto", policy="fcfs")
    seats = seats_of(comparison.log(DEFAULT))
    comparison.start_vllm(VLLM, "float32", ALL_CPUS, max_num_seqs=seats)
    parts = [f"{seats} seats each.\n", comparison.check()]
    for name, flags in WORKLOADS.items():
        sizes = {"num-jobs": _QUICK_JOBS} if arguments.quick else {}
        rate = LOAD * capacity(comparison, {**flags, **sizes})
        report = comparison.bench(
            f"queues-{flags['dataset']}",
            [DEFAULT, FCFS, VLLM],
            {**flags, **sizes, "rates": f"{rate:.2f}", "repeats": arguments.repeats},
        )
        parts.append(f"{name}, {rate:.2f} jobs/s:\n\n{table(report, [DEFAULT, FCFS, VLLM])}")
    return "\n".join(parts)


def capacity(comparison: Comparison, flags: Mapping[str, str | float]) -> float:
    """Jobs per second that FCFS serves of a workload when all are there at once."""
    num_jobs = min(_CAPACITY_JOBS, int(flags["num-jobs"]))
    report = comparison.bench(
        f"capacity-{flags['dataset']}",
        [FCFS],
        # Seed 0 is the first repeat's.
        {**flags, "num-jobs": num_jobs, "arrivals": "poisson", "rates": _AT_ONCE, "seed": 1000},
    )
    (summary,) = summaries(report, FCFS)
    return float(summary["jobs_per_s"])


def seats_of(log: Path) -> int:
    """What ``max_num_seqs: auto`` found, from the server's log."""
    found = re.search(r"at most (\d+) jobs", log.read_text(encoding="utf-8"))
    if found is None:
        raise RuntimeError(f"{log} does not say how many jobs an iteration has")
    return int(found[1])


def table(report: Report, labels: Sequence[str]) -> str:
    """Medians over the repeats, with the least and the most in brackets. Then the ratios over FCFS
    and over vLLM: the median of each repeat's ratio."""
    runs = {label: summaries(report, label) for label in labels}
    rows = [
        [label, *(spread([pick(run, figure) for run in runs[label]]) for figure in FIGURES)]
        for label in labels
    ]
    for other in labels[1:]:
        row = [f"{labels[0]} over {other}"]
        for figure in FIGURES:
            pairs = zip(runs[labels[0]], runs[other], strict=True)
            row.append(spread([pick(a, figure) / pick(b, figure) for a, b in pairs]))
        rows.append(row)
    return markdown(["", *(heading for heading, *_ in FIGURES)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="vllm_cpu.sh queues",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_arguments(parser, repeats=3)
    run_comparison(parser.parse_args(), measure)


if __name__ == "__main__":
    main()
