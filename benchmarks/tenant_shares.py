"""What fair shares cost users who take no more than theirs, and what they prevent. Simulated.

    python -m benchmarks.tenant_shares                                  # all cases, many minutes
    python -m benchmarks.tenant_shares --case users --policies gittins

The cases, each with tenants and as one tenant for all:

- ``users``: each of 1,000 equal tenants sends a job now and then. Code completion in bursts, at 0.8
  and 1.5 times capacity (Llama-3-8B on an A100-40G).
- ``backlog``: 100 tenants always have jobs waiting. ShareGPT lengths, 2.5 times capacity (OPT-13B
  on an A100-40G, 48 GiB of host memory).
- ``flood``: four tenants send 10% of the jobs each, and a fifth one the rest, 1.5 times capacity
  in all. The figures are the four's; the last row is without the fifth.

Host memory is the shipped 4 GiB where nothing else is said. Times are in seconds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from fastserve_backend.simulation.simulator import Simulation
from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.summary import summarize
from fastserve_bench.workload import TraceJob
from rich.console import Console
from rich.table import Table

from benchmarks.race_cells import Course, Variant, capacity, simulate_course

CODE = Course("llama-3-8b a100-40g", "code", 500, "bursts", host_gib=4.0)
SHAREGPT = Course("opt-13b a100-40g", "sharegpt", 500, host_gib=4.0, seed=1)
NUM_USERS, NUM_BACKLOGGED = 1000, 100
# Jobs per second of ShareGPT lengths: 1.5 times capacity, and 2.5 times.
FLOOD_RATE, BACKLOG_RATE = 2.85, 4.75
FLOOD, OTHERS = "flood", ("a", "b", "c", "d")
POLICIES = "fcfs,gittins,skip_join_mlfq"
console = Console(width=150)


def with_tenants(
    trace: Sequence[TraceJob], tenant: Callable[[random.Random], str]
) -> list[TraceJob]:
    """Each job is of the tenant that is drawn for it."""
    rng = random.Random(0)
    return [replace(job, service=replace(job.service, tenant=tenant(rng))) for job in trace]


def of_equals(count: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randrange(count))


def flood_or_other(rng: random.Random) -> str:
    return rng.choices((FLOOD, *OTHERS), (6, 1, 1, 1, 1))[0]


def all_jobs(simulation: Simulation) -> list[str]:
    """Cells of a row: what all jobs got."""
    summary = summarize(simulation.records)
    return [
        f"{summary.normalized_latency_s.mean:.3f}",
        f"{summary.normalized_latency_s.p95:.2f}",
        f"{summary.latency_s.mean:.1f}",
        f"{summary.ttft_s.p95:.2f}",
        f"{summary.output_tokens_per_s:.1f}",
        str(sum(record.num_preemptions or 0 for record in simulation.records)),
        f"{max(record.ttft_s for record in simulation.records):.0f}",
    ]


ALL_JOBS = (
    "norm. mean",
    "P95",
    "JCT",
    "first token P95",
    "tokens/s",
    "preempted",
    "first token max",
)


def jobs_of_others(simulation: Simulation) -> list[str]:
    """Cells of a row: the least and most that one of ``OTHERS`` got, and tokens/s of all."""

    def span(value: Callable[[list[JobRecord]], float]) -> str:
        values = [
            value([one for one in simulation.records if one.service.tenant == other])
            for other in OTHERS
        ]
        return f"{min(values):.3g} to {max(values):.3g}"

    return [
        span(lambda records: float(np.percentile([one.ttft_s for one in records], 95))),
        span(
            lambda records: float(
                np.percentile([one.tpot_s for one in records if one.tpot_s is not None], 95)
            )
        ),
        span(lambda records: summarize(records).normalized_latency_s.p95),
        f"{summarize(simulation.records).output_tokens_per_s:.0f}",
    ]


OTHERS_JOBS = ("first token P95", "later token P95", "norm. P95", "tokens/s")


def users(policy: str) -> Iterator[list[str]]:
    most = capacity(CODE)
    for load in (0.8, 1.5):
        trace = CODE.trace(load * most)
        for name, count in (("one tenant", 1), (f"{NUM_USERS:,} tenants", NUM_USERS)):
            simulation = simulate_course(
                CODE, Variant(policy, policy), with_tenants(trace, of_equals(count))
            )
            yield [f"load {load:g}, {name}", *all_jobs(simulation)]


def backlog(policy: str) -> Iterator[list[str]]:
    course = replace(SHAREGPT, host_gib=48.0)
    trace = course.trace(BACKLOG_RATE)
    for name, count in (("one tenant", 1), (f"{NUM_BACKLOGGED} tenants", NUM_BACKLOGGED)):
        simulation = simulate_course(
            course, Variant(policy, policy), with_tenants(trace, of_equals(count))
        )
        counters = simulation.counters
        yield [
            name,
            *all_jobs(simulation),
            f"{simulation.ended_s:.0f}",
            f"{counters.swap_in_bytes / 1e9:.0f}",
        ]


def flood(policy: str) -> Iterator[list[str]]:
    variant = Variant(policy, policy)
    trace = with_tenants(SHAREGPT.trace(FLOOD_RATE), flood_or_other)
    records = simulate_course(SHAREGPT, variant, with_tenants(trace, of_equals(1)))
    records.records[:] = [
        replace(record, service=job.service)
        for record, job in zip(records.records, trace, strict=True)
    ]
    yield ["one tenant for all", *jobs_of_others(records)]
    yield ["fair shares", *jobs_of_others(simulate_course(SHAREGPT, variant, trace))]
    rest = [job for job in trace if job.service.tenant != FLOOD]
    yield ["without the flood", *jobs_of_others(simulate_course(SHAREGPT, variant, rest))]


CASES = {
    "users": (users, ALL_JOBS),
    "backlog": (backlog, (*ALL_JOBS, "all done after", "swapped in, GB")),
    "flood": (flood, OTHERS_JOBS),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--policies", default=POLICIES, help=f"separated by commas ({POLICIES})")
    args = parser.parse_args()
    for case in args.case or CASES:
        rows, headings = CASES[case]
        table = Table(title=case)
        for heading in ("policy", "", *headings):
            table.add_column(heading, justify="right" if heading else "left")
        for policy in args.policies.split(","):
            for row in rows(policy):
                table.add_row(policy, *row)
        console.print(table)


if __name__ == "__main__":
    main()
