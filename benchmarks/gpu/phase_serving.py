"""Phase "serving": policies against each other on the same engine, and the strategies for preempted
jobs' KV.

The ranks are loaded once and serve one engine after the other. Each engine gets twice the jobs a
second that full batches serve, and as little KV memory as an A100-40G leaves. FastServe's own
figures search for the largest rate within an objective. That takes minutes a run, because a
queue has to build up first, and a GPU is not always at hand for so long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import psutil
from fastserve_backend.config_sections import MOST_AUTO_SEQS
from fastserve_backend.engine.engine import Engine
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.profile.iteration import LatencyModel
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Ready,
    Setup,
    Step,
    StepResult,
)
from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.summary import Summary, summarize
from fastserve_bench.workload import AUTHORS_LIMITS, load_lengths, poisson_trace

from benchmarks.gpu.decode_steps import BLOCK_SIZE
from benchmarks.gpu.phase_context import Context, Value, one_line
from benchmarks.gpu.random_models import engine_config, largest_model
from benchmarks.replay import TooSlow, on_the_engine

POLICIES = ("fcfs", "skip_join_mlfq", "gittins")
BATCH_LIMIT = 16
"""Most jobs in one iteration: FastServe's authors' setting."""
STRATEGIES = ("defer", "recompute", "reactive", "proactive")
OVERLOAD = 2.0  # of the capacity that the profile predicts
FEW_BLOCKS = 800
"""KV blocks of 16 tokens, 10 GB: what OPT-13B leaves of 40 GB."""
CAPACITY_CONTEXT = 400  # tokens of context, for the decodes that the capacity is computed from
MOST_SWAP_GIB, SWAP_SHARE = 8.0, 0.3
"""Host memory for KV: this much, or this share of the free memory if that is less."""
MAX_MODEL_LEN = 2048
SEED = 0
BUSY_SHARE = 0.6
"""Share of a run's time that full batches need for its jobs. The last jobs end in batches that are
not full."""
FEWEST_JOBS = 6
TIME_SHARE = 0.9
"""Share of the phase's time for the runs; the rest is for loading the ranks."""
STRATEGY_WEIGHT = 0.5
"""Time of a strategy's run over that of a policy's run."""
SETTINGS: Mapping[str, Mapping[str, int]] = {
    "16 seats": {"max_num_seqs": BATCH_LIMIT},
    "default": {},
}
"""Configuration keys beside the policy."""


class LastingRanks:
    """Ranks that one engine after the other uses, so that 13 G parameters are loaded once.

    Args:
        max_num_seqs: the largest batch limit of these engines, for which the ranks are made.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._executor = DistributedExecutor()
        self._max_num_seqs = max_num_seqs
        self._ready: Ready | None = None
        self._num_steps = self._num_copies = 0  # unfinished
        self.num_blocks: int | None = None
        """Number of the device's blocks that the next engine gets; None: all."""

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        if self._ready is None:
            for_all = msgspec.structs.replace(setup, max_num_seqs=self._max_num_seqs)
            self._ready = self._executor.start(for_all, timeout_s)
        ready = self._ready
        return msgspec.structs.replace(
            ready,
            num_blocks=min(ready.num_blocks, self.num_blocks or ready.num_blocks),
            num_host_blocks=ready.num_host_blocks if setup.swap_space_gib else 0,
        )

    @property
    def can_submit(self) -> bool:
        return self._executor.can_submit

    @property
    def can_submit_ahead(self) -> bool:
        return self._executor.can_submit_ahead

    def submit(self, step: Step) -> None:
        self._num_steps += 1
        self._executor.submit(step)

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        self._num_copies += 1
        self._executor.copy(blocks)

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        result = self._executor.collect(timeout_s)
        self._num_steps -= isinstance(result, StepResult)
        self._num_copies -= isinstance(result, CopyResult)
        return result

    def check(self) -> None:
        self._executor.check()

    def kill(self) -> None:
        self._executor.kill()

    def close(self) -> None:
        """Ends the engine's pending work; the ranks stay."""
        while self._num_steps or self._num_copies:
            self.collect()

    def end(self) -> None:
        self._executor.close()


Task = Callable[[float], None]
"""A run that takes about this many seconds."""


def run(context: Context) -> None:
    ranks = LastingRanks(MOST_AUTO_SEQS)
    policies: Sequence[Task] = [
        partial(_policy, context, ranks, setting, policy)
        for setting in SETTINGS
        for policy in POLICIES
    ]
    strategies: Sequence[Task] = [
        partial(_strategy, context, ranks, strategy) for strategy in STRATEGIES
    ]
    tasks = [(1.0, task) for task in policies]
    tasks += [(STRATEGY_WEIGHT, task) for task in strategies]
    try:
        # All runs of a kind last equally long, so that they serve the same jobs.
        unit_s = TIME_SHARE * context.left_s() / sum(weight for weight, _ in tasks)
        for weight, task in tasks:
            task(weight * unit_s)
    finally:
        ranks.end()


def _policy(
    context: Context, ranks: LastingRanks, setting: str, policy: str, seconds: float
) -> None:
    keys = SETTINGS[setting]
    with _few_blocks(context, ranks, policy=policy, **keys) as engine:
        served = _Served.of(context, engine, keys.get("max_num_seqs"), seconds)
        if policy == POLICIES[0]:
            _record_profile(context, setting, engine.profile.model)
        summary = served.summary
        context.recorder.row(
            "policies under overload",
            {"setting": setting, "policy": policy, **served.case},
            {
                **_ms_a_token(summary),
                "mean JCT, s": None if summary is None else summary.latency_s.mean,
                "P95 JCT, s": None if summary is None else summary.latency_s.p95,
                "P95 TTFT, s": None if summary is None else summary.ttft_s.p95,
                "output tokens/s": None if summary is None else summary.output_tokens_per_s,
                "preemptions": engine.counters.preemptions,
                "recomputed": engine.counters.recomputed_jobs,
            },
            served.note,
        )


def _strategy(context: Context, ranks: LastingRanks, strategy: str, seconds: float) -> None:
    keys = {"policy": "skip_join_mlfq", "max_num_seqs": BATCH_LIMIT, "strategy": strategy}
    with _few_blocks(context, ranks, **keys) as engine:
        served = _Served.of(context, engine, BATCH_LIMIT, seconds)
        counters, records = engine.counters, served.records
        stalled_s = sum(one.swap_stall_s or 0.0 for one in records)
        context.recorder.row(
            "strategies for preempted jobs' KV",
            {"strategy": strategy, **served.case},
            {
                **_ms_a_token(served.summary),
                "mean JCT, s": None if served.summary is None else served.summary.latency_s.mean,
                "blocked": stalled_s / sum(one.latency_s for one in records) if records else None,
                "GB out": counters.swap_out_bytes / 1e9,
                "GB in": counters.swap_in_bytes / 1e9,
                "GB avoided": counters.swap_avoided_bytes / 1e9,
                "recomputed": counters.recomputed_jobs,
            },
            served.note,
        )


@dataclass(frozen=True)
class _Served:
    """Result of one load."""

    case: Mapping[str, Value]
    records: Sequence[JobRecord]
    """None if the jobs did not end in time; then ``note`` says so."""
    note: str

    @property
    def summary(self) -> Summary | None:
        return summarize(self.records) if self.records else None

    @classmethod
    def of(cls, context: Context, engine: Engine, batch: int | None, seconds: float) -> _Served:
        """
        Args:
            batch: jobs in a full batch; None: as many as fit in the KV memory.
            seconds: that the run takes, roughly.
        """
        lengths = load_lengths(context.dataset, AUTHORS_LIMITS)
        if context.tiny:
            lengths = [(prompt % 20 + 1, output % 20 + 2) for prompt, output in lengths]
        prompt, output = (statistics.fmean(column) for column in zip(*lengths, strict=True))
        if batch is None:
            batch = max(1, int(_num_few_blocks(context) * BLOCK_SIZE / (prompt + output)))
        model = engine.profile.model
        decode_s = model.decodes_s(batch, CAPACITY_CONTEXT)
        capacity = 1 / (model.prefill_s(round(prompt)) + output * decode_s / batch)
        num_jobs = FEWEST_JOBS
        if not context.tiny:
            num_jobs = max(num_jobs, round(BUSY_SHARE * seconds * capacity))
        rate = OVERLOAD * capacity
        case = {"jobs": num_jobs, "jobs/s": float(f"{rate:.3g}")}
        trace = poisson_trace(lengths, rate, num_jobs, SEED)
        try:
            records = on_the_engine(engine, trace, deadline_s=min(2 * seconds, context.left_s()))
        except TooSlow as reason:
            return cls(case, (), one_line(reason))
        return cls(case, records, "")


def _record_profile(context: Context, setting: str, model: LatencyModel) -> None:
    """Records what the profile, measured at the start, predicts for some iterations."""
    times = {f"{n} decodes": model.decodes_s(n, CAPACITY_CONTEXT) for n in (1, 16, 64)}
    times |= {f"prefill of {n}": model.prefill_s(n) for n in (128, 512, 2048)}
    for iteration, seconds in times.items():
        context.recorder.row(
            "latency profile",
            {"setting": setting, "iteration": iteration},
            {"predicted, ms": seconds * 1e3},
        )


def _ms_a_token(summary: Summary | None) -> dict[str, float | None]:
    """Figures of the normalized latency."""
    latency_s = None if summary is None else summary.normalized_latency_s
    return {
        "mean, ms a token": None if latency_s is None else latency_s.mean * 1e3,
        "P95, ms a token": None if latency_s is None else latency_s.p95 * 1e3,
    }


@contextmanager
def _few_blocks(context: Context, ranks: LastingRanks, **keys: Any) -> Iterator[Engine]:
    """An engine that gets few of the device's blocks."""
    ranks.num_blocks = _num_few_blocks(context)
    free_gib = psutil.virtual_memory().available / 2**30
    sizes = {
        "max_model_len": MAX_MODEL_LEN,
        "swap_space_gib": round(min(MOST_SWAP_GIB, SWAP_SHARE * free_gib), 1),
    }
    config = engine_config(context, largest_model(context), **(sizes | keys))
    engine = Engine(config, make_executor=lambda: ranks, start_timeout_s=context.left_s())
    try:
        yield engine
    finally:
        engine.close()


def _num_few_blocks(context: Context) -> int:
    return 40 if context.tiny else FEW_BLOCKS
