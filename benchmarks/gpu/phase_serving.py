"""Phase "serving": policies against each other on the same engine, and the strategies for preempted
jobs' KV.

The ranks are loaded once and serve one engine after the other. As in FastServe's Fig. 11, each
policy's largest rate is searched at which the mean normalized latency is within ten decode
iterations, over the same jobs with Poisson arrivals that only scale. Then the default configuration
serves one load beside the same with other policies; and as in Fig. 15, all strategies serve one
load. For both there is as little KV memory as an A100-40G leaves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import psutil
from decode_steps import BLOCK_SIZE
from fastserve_backend.config import MOST_AUTO_SEQS
from fastserve_backend.engine.engine import Engine
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.worker.messages import CopyBlocks, CopyResult, Ready, Setup, Step, StepResult
from fastserve_client.report.records import JobRecord
from fastserve_client.report.summary import Summary, summarize
from fastserve_client.workload import AUTHORS_LIMITS, Lengths, load_lengths, poisson_trace
from phase_context import Context, one_line
from random_models import engine_config, largest_model
from replay import TooSlow, on_the_engine

POLICIES = ("fcfs", "skip_join_mlfq")
BATCH_LIMIT = 16
"""Most jobs in one iteration: FastServe's authors' setting."""
SLO_ITERATIONS, SLO_BATCH, SLO_CONTEXT = 10, 16, 400
"""The SLO in decode iterations of so many jobs with so many tokens each, as benchmarks/paper has
it: 0.3 s a token for OPT-13B on the authors' A100."""
DEFAULTS_AGAINST = ("fcfs", "gittins", "skip_join_mlfq")
STRATEGIES = ("defer", "recompute", "reactive", "proactive")
OVERLOAD = 1.5  # of capacity
FEW_BLOCKS = 800
"""KV blocks of 16 tokens, 10 GB: what OPT-13B leaves of 40 GB."""
MOST_SWAP_GIB, SWAP_SHARE = 8.0, 0.3
"""Host memory for KV: so much, or this share of what is free."""
MAX_MODEL_LEN = 2048
SEED = 0

MOST_TRACE_S, LEAST_TRACE_S, TRACE_SHARE = 20.0, 5.0, 0.05
"""Jobs of one run: those that arrive in this share of the phase's time, within these bounds, at the
rate that full batches serve."""
MOST_JOBS, FEWEST_JOBS = 400, 40
FIRST_STEP, TOLERANCE = 1.6, 1.12
"""Of a search: factor between rates until one is too high, and between the two that end it."""
DEFAULTS_WEIGHT, STRATEGIES_WEIGHT = 1.5, 1.0
"""Of the phase's time, over what the search for one rate gets."""
Task = Callable[[float], None]
"""Takes so many seconds."""


class LastingRanks:
    """Ranks that one engine after the other uses: loading 13 G parameters once is enough.

    Args:
        max_num_seqs: the largest batch limit of these engines, for which the ranks are made.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._executor = DistributedExecutor()
        self._max_num_seqs = max_num_seqs
        self._ready: Ready | None = None
        self._num_steps = self._num_copies = 0  # unfinished
        self.num_blocks: int | None = None
        """So many of the device's blocks are the next engine's; None: all."""

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

    def copy(self, blocks: CopyBlocks) -> None:
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
        """What the engine has not waited for ends here; the ranks stay."""
        while self._num_steps or self._num_copies:
            self.collect()

    def end(self) -> None:
        self._executor.close()


@dataclass(frozen=True)
class Workload:
    """Jobs to choose from, and for how long they arrive."""

    lengths: Lengths
    trace_s: float
    fewest_jobs: int

    @classmethod
    def of(cls, context: Context) -> Workload:
        lengths = load_lengths(context.dataset, AUTHORS_LIMITS)
        if context.tiny:
            return cls([(prompt % 20 + 1, output % 20 + 2) for prompt, output in lengths], 0.0, 6)
        trace_s = min(MOST_TRACE_S, max(LEAST_TRACE_S, TRACE_SHARE * context.left_s()))
        return cls(lengths, trace_s, FEWEST_JOBS)


@dataclass(frozen=True)
class Load:
    """What the engine is given."""

    lengths: Lengths
    num_jobs: int
    capacity: float
    """Jobs per second that full batches serve, roughly: prefills alone, decodes shared."""
    slo_s: float

    @classmethod
    def of(cls, workload: Workload, latency: LatencyModel, batch: int) -> Load:
        lengths = workload.lengths
        prompt, output = (statistics.fmean(column) for column in zip(*lengths, strict=True))
        slo_s = SLO_ITERATIONS * _decode_s(latency, SLO_BATCH)
        busy_s = latency.prefill_s(round(prompt)) + output * _decode_s(latency, batch) / batch
        num_jobs = max(workload.fewest_jobs, min(MOST_JOBS, round(workload.trace_s / busy_s)))
        return cls(lengths, num_jobs, 1 / busy_s, slo_s)

    def serve(
        self, engine: Engine, rate: float, deadline_s: float, most_mean_s: float = math.inf
    ) -> list[JobRecord]:
        """
        Raises:
            TooSlow: as ``replay.on_the_engine``.
        """
        trace = poisson_trace(self.lengths, rate, self.num_jobs, SEED)
        return on_the_engine(engine, trace, deadline_s=deadline_s, most_mean_s=most_mean_s)


def _decode_s(latency: LatencyModel, batch: int) -> float:
    return latency.iteration_s(IterationLoad.of([(SLO_CONTEXT - 1, 1, True)] * batch))


@dataclass
class Search:
    """Bisects for the largest rate that meets the SLO."""

    rate: float
    """To try next."""
    good: float = 0.0
    bad: float = math.inf

    @property
    def has_ended(self) -> bool:
        return self.good > 0 and self.bad / self.good <= TOLERANCE

    def tried(self, *, met: bool) -> None:
        if met:
            self.good = self.rate
        else:
            self.bad = self.rate
        if self.good == 0:
            rate = self.bad / FIRST_STEP
        elif self.bad == math.inf:
            rate = self.good * FIRST_STEP
        else:
            rate = math.sqrt(self.good * self.bad)
        self.rate = float(f"{rate:.3g}")


def run(context: Context) -> None:
    workload = Workload.of(context)
    ranks = LastingRanks(MOST_AUTO_SEQS)
    tasks: list[tuple[float, Task]] = [
        *((1.0, partial(_throughput, context, ranks, workload, policy)) for policy in POLICIES),
        (DEFAULTS_WEIGHT, partial(_defaults, context, ranks, workload)),
        (STRATEGIES_WEIGHT, partial(_strategies, context, ranks, workload)),
    ]
    try:
        for index, (weight, task) in enumerate(tasks):
            task(context.left_s() * weight / sum(other for other, _ in tasks[index:]))
    finally:
        ranks.end()


def _engine(context: Context, ranks: LastingRanks, **keys: object) -> Engine:
    free_gib = psutil.virtual_memory().available / 2**30
    sizes = {
        "max_model_len": MAX_MODEL_LEN,
        "swap_space_gib": round(min(MOST_SWAP_GIB, SWAP_SHARE * free_gib), 1),
    }
    config = engine_config(context, largest_model(context), **(sizes | keys))
    engine = Engine(config, make_executor=lambda: ranks)
    engine.start(timeout_s=context.left_s())
    return engine


def _throughput(
    context: Context,
    ranks: LastingRanks,
    workload: Workload,
    policy: str,
    budget_s: float,
) -> None:
    ends_s = context.left_s() - budget_s
    engine = _engine(context, ranks, policy=policy, max_num_seqs=BATCH_LIMIT)
    try:
        load = Load.of(workload, engine.profile.model, BATCH_LIMIT)
        search = Search(float(f"{load.capacity:.3g}"))
        while not search.has_ended and context.left_s() > ends_s:
            summary, note = None, ""
            try:
                left_s = context.left_s() - ends_s
                records = load.serve(engine, search.rate, left_s, load.slo_s)
                summary = summarize(records)
            except TooSlow as reason:
                if context.left_s() <= ends_s:
                    break  # the time was short, not the engine slow
                note = str(reason)
            met = summary is not None and summary.normalized_latency_s.mean <= load.slo_s
            _record_run(context, policy, search.rate, load, summary, note)
            search.tried(met=met)
            if context.tiny:
                break
    finally:
        engine.close()
    context.recorder.row(
        "throughput under the SLO",
        {"batch limit": BATCH_LIMIT, "policy": policy},
        {
            "SLO, ms a token": load.slo_s * 1e3,
            "jobs/s that met it": search.good or None,
            "jobs/s that missed it": None if math.isinf(search.bad) else search.bad,
            "capacity, jobs/s": load.capacity,
            "jobs": load.num_jobs,
        },
    )


def _record_run(
    context: Context,
    policy: str,
    rate: float,
    load: Load,
    summary: Summary | None,
    note: str,
) -> None:
    context.recorder.row(
        "latency over load",
        {"batch limit": BATCH_LIMIT, "policy": policy, "jobs/s": rate},
        {
            "load, of capacity": rate / load.capacity,
            **_ms_a_token(summary),
            "P95 TTFT, s": None if summary is None else summary.ttft_s.p95,
            "output tokens/s": None if summary is None else summary.output_tokens_per_s,
        },
        note,
    )


def _ms_a_token(summary: Summary | None) -> dict[str, float | None]:
    """Figures of the normalized latency."""
    latency_s = None if summary is None else summary.normalized_latency_s
    return {
        "mean, ms a token": None if latency_s is None else latency_s.mean * 1e3,
        "P95, ms a token": None if latency_s is None else latency_s.p95 * 1e3,
    }


def _defaults(context: Context, ranks: LastingRanks, workload: Workload, budget_s: float) -> None:
    """All of the default configuration but for the policy serves more than fits."""
    tokens = statistics.fmean(map(sum, workload.lengths))
    batch = max(1, int((_few_blocks(context) * BLOCK_SIZE) / tokens))
    for policy in DEFAULTS_AGAINST:
        with _few(context, ranks, policy=policy) as engine:
            load = Load.of(workload, engine.profile.model, batch)
            records, note = _overload(load, engine, budget_s / len(DEFAULTS_AGAINST))
            summary = summarize(records) if records else None
            context.recorder.row(
                "default configuration under overload",
                {"policy": policy, "load, of capacity": OVERLOAD, "jobs": load.num_jobs},
                {
                    **_ms_a_token(summary),
                    "mean JCT, s": None if summary is None else summary.latency_s.mean,
                    "P95 JCT, s": None if summary is None else summary.latency_s.p95,
                    "P95 TTFT, s": None if summary is None else summary.ttft_s.p95,
                    "output tokens/s": None if summary is None else summary.output_tokens_per_s,
                    "preemptions": engine.counters.preemptions,
                },
                note,
            )


def _strategies(context: Context, ranks: LastingRanks, workload: Workload, budget_s: float) -> None:
    for strategy in STRATEGIES:
        keys = {"policy": "skip_join_mlfq", "max_num_seqs": BATCH_LIMIT, "strategy": strategy}
        with _few(context, ranks, **keys) as engine:
            load = Load.of(workload, engine.profile.model, BATCH_LIMIT)
            records, note = _overload(load, engine, budget_s / len(STRATEGIES))
            _record_strategy(context, strategy, engine, records, note)


@contextmanager
def _few(context: Context, ranks: LastingRanks, **keys: object) -> Iterator[Engine]:
    """An engine that has few of the device's blocks."""
    ranks.num_blocks = _few_blocks(context)
    engine = _engine(context, ranks, **keys)
    try:
        yield engine
    finally:
        engine.close()
        ranks.num_blocks = None


def _few_blocks(context: Context) -> int:
    return 40 if context.tiny else FEW_BLOCKS


def _overload(load: Load, engine: Engine, most_s: float) -> tuple[list[JobRecord], str]:
    """The jobs' records; or none, and the reason, if it takes longer than its share of the time."""
    try:
        return load.serve(engine, OVERLOAD * load.capacity, most_s), ""
    except TooSlow as reason:
        return [], one_line(reason)


def _record_strategy(
    context: Context, strategy: str, engine: Engine, records: Sequence[JobRecord], note: str
) -> None:
    counters = engine.counters
    summary = summarize(records) if records else None
    stalled_s = sum(one.swap_stall_s or 0.0 for one in records)
    context.recorder.row(
        "strategies for preempted jobs' KV",
        {"strategy": strategy, "load, of capacity": OVERLOAD},
        {
            **_ms_a_token(summary),
            "mean JCT, s": None if summary is None else summary.latency_s.mean,
            "blocked": stalled_s / sum(one.latency_s for one in records) if records else None,
            "GB out": counters.swap_out_bytes / 1e9,
            "GB in": counters.swap_in_bytes / 1e9,
            "GB avoided": counters.swap_avoided_bytes / 1e9,
            "recomputed": counters.recomputed_jobs,
        },
        note,
    )
