"""Time of one scheduling decision of each policy, with many jobs waiting, on one core.

    python -m benchmarks.scheduler_decisions                   # all policies
    python -m benchmarks.scheduler_decisions --policy srpt     # one policy

A decision is everything that the engine asks of a policy and of the KV manager in one iteration:
the order, the batch and its KV blocks, the results of the jobs that ran, and as many arrivals as
jobs ended. So the number of waiting jobs stays the same. The jobs' own updates are not timed.
Copies to and from the host end two iterations later.

"Short" is KV memory for twice as many jobs as a batch has, with a host tier ten times as large and
the strategy proactive. "Unlimited" is memory for all. Prompt and output lengths are drawn from a
long-tailed distribution with a fixed seed. Seven of eight outputs are predicted, typically wrong by
a factor of 1.6. Every second job has latency objectives. With "long prompts" all are so long that a
few fill an iteration. With priorities or tenants, each job has one of them at random.

Each figure is the median decision in milliseconds, with the 99th percentile in brackets. It is
processor time, so that a busy machine does not count as a slow decision.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from array import array
from collections import deque
from dataclasses import dataclass

from fastserve_backend.config import EngineConfig
from fastserve_backend.job import FinishReason, Job, ServiceLevel
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.round import StepVerdict
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import Transfer
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import fill_batch
from fastserve_backend.scheduler.policy_context import make_policy
from fastserve_backend.scheduler.registry import BUILT_IN_POLICIES
from rich.console import Console
from rich.table import Table

SEATS = (16, 256)
LONG_PROMPT = 1500  # tokens, of the 2,048 of an iteration
MAX_MODEL_LEN = 2048
LONGEST_PROMPT, LONGEST_OUTPUT = 1024, 1024
JOB_BLOCKS = 16  # of a typical job
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.1
PREDICTION_ERROR = 0.5  # standard deviation of ln(predicted / real)
COPY_DECISIONS = 2  # a copy takes this many
WARM_UP_DECISIONS = 300
console = Console(width=150)


class LinearTimes:
    """Iterations of tens of milliseconds; they only decide the order of the jobs."""

    def prefill_s(self, num_tokens: int) -> float:
        return 0.02 + 0.00015 * num_tokens

    def decode_s(self, context_tokens: int) -> float:
        return 0.025

    def decodes_s(self, num_jobs: int, context_tokens: int) -> float:
        return 0.025 + 0.0001 * num_jobs

    def score_s(self, num_tokens: int) -> float:
        return 0.00015 * num_tokens


@dataclass(frozen=True)
class Load:
    """What waits. One column of the table."""

    num_waiting: int
    prompt_tokens: int | None = None
    """Of every job; None: drawn."""
    priorities: tuple[int, ...] = (0,)
    num_tenants: int = 1

    def __str__(self) -> str:
        long = "" if self.prompt_tokens is None else ", long prompts"
        several = f", {len(self.priorities)} priorities" if len(self.priorities) > 1 else ""
        tenants = f", {self.num_tenants:,} tenants" if self.num_tenants > 1 else ""
        return f"{self.num_waiting:,} waiting{long}{several}{tenants}"


LOADS = (
    Load(100),
    Load(1_000),
    Load(10_000),
    Load(10_000, prompt_tokens=LONG_PROMPT),
    Load(10_000, priorities=(-2, -1, 0, 1, 2)),
    Load(10_000, num_tenants=1000),
)


class Decisions:
    """One policy with a constant number of waiting jobs."""

    def __init__(self, name: str, seats: int, load: Load, is_short: bool) -> None:
        self._load = load
        self._rng = random.Random(0)
        self._service_rng = random.Random(1)  # of its own, so that all loads have the same lengths
        self._now_s = 0.0
        self._num_jobs = 0
        self._decision = 0
        self._times = LinearTimes()
        config = EngineConfig().with_keys(policy=name, max_num_seqs=seats, prefix_caching=False)
        num_jobs = 2 * seats if is_short else load.num_waiting + 2 * seats
        num_blocks = JOB_BLOCKS * num_jobs + MAX_MODEL_LEN // 16
        self._policy = make_policy(config.scheduler, self._times, MAX_MODEL_LEN, 16 * num_blocks)
        tiers = TwoTierKV(num_blocks, 10 * num_blocks, 16, incremental=True)
        costs = SwapCosts(self._times, 1, Link(1e-4, 1e-4))
        counters = EngineCounters(LatencyHistograms(0.3))
        self._kv = KVManager(tiers, self._policy, config.kv_cache, costs, counters)
        self._copies: deque[tuple[int, Transfer]] = deque()  # (decision when it ends, copy)
        self._num_decodes = 0
        for _ in range(load.num_waiting + seats):
            job = self._new_job()
            self._kv.on_arrival(job, self._now_s)
            self._policy.add(job, self._now_s)

    def next_s(self) -> float:
        """Make one decision and return how long it took."""
        self._decision += 1
        policy, kv = self._policy, self._kv
        started = time.thread_time()
        while self._copies and self._copies[0][0] <= self._decision:
            _, transfer = self._copies.popleft()
            kv.on_transfer_finished(transfer.job_number, succeeded=True, seconds=1e-3)
        kv_round = kv.start_round(self._now_s, ())
        walk = policy.walk(self._now_s, ())
        limits = policy.limits_for(self._now_s, self._num_jobs, self._num_decodes)
        batch = fill_batch(walk, limits, (), kv_round)
        result = kv_round.commit()
        took_s = time.thread_time() - started
        self._copies.extend(
            (self._decision + COPY_DECISIONS, transfer) for transfer in result.transfers
        )
        if result.verdict is not StepVerdict.SEND:
            return took_s
        self._num_decodes = sum(num_tokens == 1 for _, num_tokens in batch)
        for job, num_tokens in batch:
            job.on_sent(num_tokens)
            if job.num_pending:
                job.num_pending = 0
                job.output_ids.append(0)
        self._now_s += 0.03
        ended = [job for job, _ in batch if len(job.output_ids) == job.params.max_tokens]
        for job in ended:
            job.finish_reason = FinishReason.LENGTH
        arrived = [self._new_job() for _ in ended]
        started = time.thread_time()
        kv.on_sent()
        policy.on_batch_sent(batch)
        policy.on_iteration_finished(batch, self._now_s)
        for job in ended:
            policy.remove(job)
            kv.release(job, self._now_s)
        for job in arrived:
            kv.on_arrival(job, self._now_s)
            policy.add(job, self._now_s)
        return took_s + time.thread_time() - started

    def _new_job(self) -> Job:
        output_tokens = self._length(LONGEST_OUTPUT)
        predicted = round(output_tokens * self._rng.lognormvariate(0.0, PREDICTION_ERROR))
        prompt_tokens = self._load.prompt_tokens or self._length(LONGEST_PROMPT)
        job = Job(
            id=str(self._num_jobs),
            number=self._num_jobs,
            prompt_ids=array("i", bytes(4 * prompt_tokens)),
            params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            arrival_s=self._now_s,
            service=ServiceLevel(
                priority=self._service_rng.choice(self._load.priorities),
                ttft_slo_s=TTFT_SLO_S if self._num_jobs % 2 else None,
                tpot_slo_s=TPOT_SLO_S if self._num_jobs % 2 else None,
                tenant=str(self._service_rng.randrange(self._load.num_tenants)),
            ),
            predicted_tokens=predicted if self._num_jobs % 8 else None,
        )
        self._num_jobs += 1
        return job

    def _length(self, longest: int) -> int:
        return min(longest, 1 + int(self._rng.lognormvariate(4.5, 1.2)))


def median_and_p99(decisions: Decisions, count: int) -> str:
    for _ in range(WARM_UP_DECISIONS):
        decisions.next_s()
    times_ms = [decisions.next_s() * 1e3 for _ in range(count)]
    p99 = statistics.quantiles(times_ms, n=100)[98]
    return f"{statistics.median(times_ms):.2f} [{p99:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(BUILT_IN_POLICIES)
    parser.add_argument("--policy", choices=names, action="append", help="default: all")
    parser.add_argument("--decisions", type=int, default=1000, help="timed for each figure (1000)")
    args = parser.parse_args()
    if args.decisions < 2:
        parser.error(f"--decisions: got {args.decisions}; must be at least 2")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table = Table(title="One decision, ms: median [99th percentile]")
    for heading in ("policy", "seats", "KV memory"):
        table.add_column(heading)
    for load in LOADS:
        table.add_column(str(load), justify="right")
    for name in args.policy or names:
        for seats in SEATS:
            for is_short in (True, False):
                cells = [
                    median_and_p99(Decisions(name, seats, load, is_short), args.decisions)
                    for load in LOADS
                ]
                table.add_row(name, str(seats), "short" if is_short else "unlimited", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
