"""Time of one scheduling decision of each policy, with many jobs waiting, on one core.

    python benchmarks/scheduler_decisions.py                   # 100, 1,000 and 10,000 waiting jobs
    python benchmarks/scheduler_decisions.py --policy srpt     # one policy

A decision is everything that the engine asks of a policy in one iteration with a batch of 16:
`fill_batch` along its `walk`, `iteration_done` for the jobs that ran, `remove` for those that ended
and `add` for as many new ones, so that the number of waiting jobs stays the same. Prompt and output
lengths are drawn from a long-tailed distribution with a fixed seed, seven of eight outputs are
predicted, wrong by a factor of 1.6 typically, and the jobs' own updates are not part of the time.
In the last column all prompts are so long that only one fits an iteration: the others are passed
over for the decodes behind them.
Each figure is the median decision in microseconds, with the 99th percentile in brackets.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from array import array
from typing import get_args

from fastserve_backend.config import EngineConfig, PolicyName
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import UNLIMITED, Policy, fill_batch
from fastserve_backend.scheduler.registry import make_policy
from rich.console import Console
from rich.table import Table

WAITING = (100, 1_000, 10_000)
LONG_PROMPT = 1500  # tokens, of the 2,048 of an iteration
BATCH = 16
MAX_MODEL_LEN = 2048
LONGEST_PROMPT, LONGEST_OUTPUT = 1024, 1024
PREDICTION_ERROR = 0.5  # standard deviation of ln(predicted / real)
WARM_UP_DECISIONS = 200
console = Console(width=100)


class LinearTimes:
    """Iterations of tens of milliseconds; they only decide in which queues the jobs are."""

    def prefill_s(self, num_tokens: int) -> float:
        return 0.02 + 0.00015 * num_tokens

    def decode_s(self, context_tokens: int) -> float:
        return 0.025


class Decisions:
    """One policy with a constant number of waiting jobs."""

    def __init__(self, name: str, num_waiting: int, prompt_tokens: int | None) -> None:
        self._prompt_tokens = prompt_tokens
        self._rng = random.Random(0)
        self._now_s = 0.0
        self._num_jobs = 0
        self._times = LinearTimes()
        config = EngineConfig().with_keys(policy=name, max_num_seqs=BATCH)
        self._policy: Policy = make_policy(config.scheduler, self._times, MAX_MODEL_LEN)
        for _ in range(num_waiting + BATCH):
            self._policy.add(self._new_job(), self._now_s)

    def next_s(self) -> float:
        """Make one decision and return how long it took."""
        policy = self._policy
        started = time.perf_counter()
        batch = fill_batch(policy.walk(self._now_s, ()), policy.limits, (), UNLIMITED)
        select_s = time.perf_counter() - started
        elapsed_s = sum(
            self._times.prefill_s(count) if count > 1 else 0.0 for _, count in batch
        ) + self._times.decode_s(1)
        self._now_s += elapsed_s
        for job, count in batch:
            job.num_computed += count
            job.output_ids.append(0)
        jobs = [job for job, _ in batch]
        ended = [job for job in jobs if len(job.output_ids) == job.params.max_tokens]
        for job in ended:
            job.finish_reason = FinishReason.LENGTH
        arrived = [self._new_job() for _ in ended]
        started = time.perf_counter()
        policy.iteration_done(jobs, elapsed_s, self._now_s)
        for job in ended:
            policy.remove(job)
        for job in arrived:
            policy.add(job, self._now_s)
        return select_s + time.perf_counter() - started

    def _new_job(self) -> Job:
        output_tokens = self._length(LONGEST_OUTPUT)
        predicted = round(output_tokens * self._rng.lognormvariate(0.0, PREDICTION_ERROR))
        job = Job(
            id=str(self._num_jobs),
            number=self._num_jobs,
            prompt_ids=array("i", bytes(4 * (self._prompt_tokens or self._length(LONGEST_PROMPT)))),
            params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            arrival_s=self._now_s,
            predicted_tokens=predicted if self._num_jobs % 8 else None,
        )
        self._num_jobs += 1
        return job

    def _length(self, longest: int) -> int:
        return min(longest, 1 + int(self._rng.lognormvariate(4.5, 1.2)))


def median_and_p99_us(
    name: str, num_waiting: int, prompt_tokens: int | None, num_decisions: int
) -> tuple[float, float]:
    decisions = Decisions(name, num_waiting, prompt_tokens)
    for _ in range(WARM_UP_DECISIONS):
        decisions.next_s()
    times_us = [decisions.next_s() * 1e6 for _ in range(num_decisions)]
    return statistics.median(times_us), statistics.quantiles(times_us, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = get_args(PolicyName)
    parser.add_argument("--policy", choices=names, action="append", help="default: all")
    parser.add_argument("--decisions", type=int, default=2000, help="timed for each figure (2000)")
    args = parser.parse_args()
    if args.decisions < 2:
        parser.error(f"--decisions: got {args.decisions}; must be at least 2")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table = Table(title=f"One decision, batch of {BATCH}, µs: median [99th percentile]")
    table.add_column("policy")
    columns: list[tuple[int, int | None]] = [(num_waiting, None) for num_waiting in WAITING]
    for num_waiting, _ in columns:
        table.add_column(f"{num_waiting:,} waiting", justify="right")
    columns.append((WAITING[-1], LONG_PROMPT))
    table.add_column(f"{WAITING[-1]:,}, long prompts", justify="right")
    for name in args.policy or names:
        cells = []
        for num_waiting, prompt_tokens in columns:
            median, p99 = median_and_p99_us(name, num_waiting, prompt_tokens, args.decisions)
            cells.append(f"{median:.0f} [{p99:.0f}]")
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
