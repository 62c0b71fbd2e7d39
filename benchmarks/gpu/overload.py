"""The engine under overload: the same jobs with one setting after the other.

The ranks are loaded once and serve one engine after the other. Jobs come at twice the rate that
full batches serve, and KV has as little memory as an A100-40G leaves. FastServe's own figures
search for the largest rate within an objective. That takes minutes a run, because a queue has to
build up first, and a GPU is not always at hand for so long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
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
from fastserve_bench.workload import AUTHORS_LIMITS, TraceJob, load_lengths, poisson_trace

from benchmarks.gpu.decode_steps import BLOCK_SIZE
from benchmarks.gpu.host_memory import available_gib
from benchmarks.gpu.phase_context import Context, Value, one_line
from benchmarks.gpu.random_models import engine_config, largest_model
from benchmarks.replay import TooSlow, on_the_engine

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
"""Share of the time after the first engine's start for the runs; the rest is for later starts."""


class LastingRanks:
    """Ranks that one engine after the other uses, so that 13 G parameters are loaded once.

    They are made for the first engine, so all must have its limits.

    Args:
        num_blocks: the device's blocks that an engine gets.
    """

    def __init__(self, num_blocks: int) -> None:
        self._executor = DistributedExecutor()
        self._num_blocks = num_blocks
        self._ready: Ready | None = None
        self._num_steps = self._num_copies = 0  # unfinished

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        if self._ready is None:
            self._ready = self._executor.start(setup, timeout_s)
        ready = self._ready
        return msgspec.structs.replace(
            ready,
            num_blocks=min(ready.num_blocks, self._num_blocks),
            num_host_blocks=ready.num_host_blocks if setup.swap_space_gib else 0,
        )

    @property
    def listened_s(self) -> float:
        return self._executor.listened_s

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


def compare_policies(context: Context, seats: int, policies: Sequence[str]) -> None:
    """Serves the same jobs under one policy after the other."""

    def record(keys: Mapping[str, Any], engine: Engine, served: Served) -> None:
        if keys["policy"] == policies[0]:
            _record_profile(context, seats, engine.profile.model)
        summary = served.summary
        context.recorder.row(
            "policies under overload",
            {"setting": f"{seats} seats", **keys, **served.case},
            {
                **served.ms_a_token(),
                "mean JCT, s": None if summary is None else summary.latency_s.mean,
                "P95 JCT, s": None if summary is None else summary.latency_s.p95,
                "P95 TTFT, s": None if summary is None else summary.ttft_s.p95,
                "output tokens/s": None if summary is None else summary.output_tokens_per_s,
                "preemptions": engine.counters.preemptions,
                "recomputed": engine.counters.recomputed_jobs,
            },
            served.note,
        )

    serve(context, seats, [{"policy": policy} for policy in policies], record)


@dataclass(frozen=True)
class Served:
    """Result of one run."""

    case: Mapping[str, Value]
    """Number of jobs and their rate."""
    records: Sequence[JobRecord]
    """Empty if the jobs did not end in time; then ``note`` says so."""
    note: str

    @property
    def summary(self) -> Summary | None:
        return summarize(self.records) if self.records else None

    def ms_a_token(self) -> dict[str, float | None]:
        """Figures of the normalized latency."""
        latency_s = None if self.summary is None else self.summary.normalized_latency_s
        return {
            "mean, ms a token": None if latency_s is None else latency_s.mean * 1e3,
            "P95, ms a token": None if latency_s is None else latency_s.p95 * 1e3,
        }


def serve(
    context: Context,
    seats: int,
    settings: Sequence[Mapping[str, Any]],
    record: Callable[[Mapping[str, Any], Engine, Served], None],
) -> None:
    """Serves the same jobs with each of the settings, in the phase's time.

    Args:
        seats: most jobs in one iteration.
        settings: keys of ``engine.yaml``.
        record: is called after each run, with its engine.
    """
    ranks = LastingRanks(40 if context.tiny else FEW_BLOCKS)
    common = {
        "max_num_seqs": seats,
        "max_model_len": MAX_MODEL_LEN,
        "swap_space_gib": round(min(MOST_SWAP_GIB, SWAP_SHARE * available_gib()), 1),
    }
    load: _Load | None = None
    try:
        for keys in settings:
            config = engine_config(context, largest_model(context), **common, **keys)
            engine = Engine(config, make_executor=lambda: ranks, start_timeout_s=context.left_s())
            try:
                if load is None:
                    seconds = TIME_SHARE * context.left_s() / len(settings)
                    load = _Load.of(context, engine.profile.model, seats, seconds)
                record(keys, engine, load.serve(context, engine))
            finally:
                engine.close()
    finally:
        ranks.end()


@dataclass(frozen=True)
class _Load:
    """Jobs, at twice the rate that an engine can serve."""

    trace: list[TraceJob]
    rate: float
    """Jobs a second."""
    seconds: float
    """That serving them takes, roughly."""

    @classmethod
    def of(cls, context: Context, model: LatencyModel, seats: int, seconds: float) -> _Load:
        lengths = load_lengths(context.dataset, AUTHORS_LIMITS)
        if context.tiny:
            lengths = [(prompt % 20 + 1, output % 20 + 2) for prompt, output in lengths]
        prompt, output = (statistics.fmean(column) for column in zip(*lengths, strict=True))
        # No more jobs run at once than the KV memory holds.
        batch = min(seats, max(1, int(FEW_BLOCKS * BLOCK_SIZE / (prompt + output))))
        decode_s = model.decodes_s(batch, CAPACITY_CONTEXT)
        capacity = 1 / (model.prefill_s(round(prompt)) + output * decode_s / batch)
        num_jobs = FEWEST_JOBS
        if not context.tiny:
            num_jobs = max(num_jobs, round(BUSY_SHARE * seconds * capacity))
        rate = OVERLOAD * capacity
        return cls(poisson_trace(lengths, rate, num_jobs, SEED), rate, seconds)

    def serve(self, context: Context, engine: Engine) -> Served:
        case = {"jobs": len(self.trace), "jobs/s": float(f"{self.rate:.3g}")}
        deadline_s = min(2 * self.seconds, context.left_s())
        try:
            return Served(case, on_the_engine(engine, self.trace, deadline_s=deadline_s), "")
        except TooSlow as reason:
            return Served(case, (), one_line(reason))


def _record_profile(context: Context, seats: int, model: LatencyModel) -> None:
    """Records what the profile, measured at the start, predicts for some iterations."""
    times = {f"{n} decodes": model.decodes_s(n, CAPACITY_CONTEXT) for n in (1, 16, 64)}
    times |= {f"prefill of {n}": model.prefill_s(n) for n in (128, 512, 2048)}
    for iteration, seconds in times.items():
        context.recorder.row(
            "latency profile",
            {"setting": f"{seats} seats", "iteration": iteration},
            {"predicted, ms": seconds * 1e3},
        )
