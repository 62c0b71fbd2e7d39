"""What becomes of preempted jobs' KV when memory is short, on the real engine (FastServe Fig. 15).

    python benchmarks/swap_strategies.py

OPT-125M with dummy weights on this machine, skip-join MLFQ, few KV blocks on purpose. The same
trace on each strategy, in turn; medians over the repeats, and the ratio of the mean to that of
``proactive`` in the same repeat. "blocked": share of the latencies in which a job waits for its KV.
``benchmarks/paper/fig15.py`` simulates the same for a large model on a GPU.
"""

from __future__ import annotations

import argparse
import statistics

from fastserve_backend import LLM
from fastserve_bench.report.summary import summarize
from replay import DTYPE, MODEL, Lengths, on_the_engine, workload
from rich.console import Console
from rich.table import Table

# Short prompts and long-tailed outputs: what preemption is for.
PROMPTS, OUTPUTS = Lengths(2.5, 0.7, 64), Lengths(3.3, 1.3, 400)
STRATEGIES = ("defer", "recompute", "reactive", "proactive")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="4,8", help="jobs/s, separated by commas")
    parser.add_argument("--jobs", type=int, default=80)
    parser.add_argument("--device-blocks", type=int, default=60, help="of 16 tokens each")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    table = Table(
        title=f"{arguments.jobs} jobs, {arguments.device_blocks} KV blocks; normalized latency, ms"
    )
    headings = (
        "jobs/s, strategy", "mean", "P95", "× proactive", "JCT, s", "blocked",
        "MB out", "in", "avoided", "recomputed",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    for rate in (float(text) for text in arguments.rates.split(",")):
        trace = workload(rate, arguments.jobs, 0, PROMPTS, OUTPUTS)
        rows: dict[str, list[tuple[float, ...]]] = {strategy: [] for strategy in STRATEGIES}
        for _ in range(arguments.repeats):
            for strategy in STRATEGIES:
                with LLM(
                    MODEL,
                    load_format="dummy",
                    dtype=DTYPE,
                    device_blocks=arguments.device_blocks,
                    max_model_len=arguments.device_blocks * 16,
                    strategy=strategy,
                    prefix_caching=False,
                ) as llm:
                    records = on_the_engine(llm.engine, trace)
                    counters = llm.engine.counters
                summary = summarize(records)
                rows[strategy].append(
                    (
                        summary.normalized_latency_s.mean * 1e3,
                        summary.normalized_latency_s.p95 * 1e3,
                        summary.latency_s.mean,
                        sum(one.swap_stall_s or 0.0 for one in records)
                        / sum(one.latency_s for one in records),
                        counters.swap_out_bytes / 1e6,
                        counters.swap_in_bytes / 1e6,
                        counters.swap_avoided_bytes / 1e6,
                        counters.recomputed_jobs,
                    )
                )
        for strategy in STRATEGIES:
            medians = [statistics.median(column) for column in zip(*rows[strategy], strict=True)]
            ratios = [
                own[0] / best[0]
                for own, best in zip(rows[strategy], rows["proactive"], strict=True)
            ]
            mean, p95, jct, blocked, out_mb, in_mb, avoided_mb, recomputed = medians
            table.add_row(
                f"{rate:g}, {strategy}",
                f"{mean:.1f}",
                f"{p95:.1f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                f"{jct:.2f}",
                f"{blocked:.2%}",
                f"{out_mb:.0f}",
                f"{in_mb:.0f}",
                f"{avoided_mb:.0f}",
                f"{recomputed:.0f}",
                end_section=strategy == STRATEGIES[-1],
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
