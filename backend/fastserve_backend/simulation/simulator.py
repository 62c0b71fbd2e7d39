"""Run a trace through the engine's step loop without an engine: a virtual clock, modelled ranks."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fastserve_bench.report.records import JobRecord
from fastserve_bench.workload import TraceJob

from fastserve_backend.config import KVCacheSection, SchedulerSection
from fastserve_backend.engine.delivery import NewToken, OnEnd
from fastserve_backend.engine.step_loop import StepLoop
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import BatchLimits, Policy
from fastserve_backend.scheduler.batch_limits import batch_limits
from fastserve_backend.scheduler.registry import make_policy
from fastserve_backend.simulation.memory import KVMemory
from fastserve_backend.simulation.simulated_executor import SimulatedExecutor
from fastserve_backend.system.clock import VirtualClock

PolicyOfLimits: TypeAlias = Callable[[BatchLimits], Policy]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened to a trace."""

    records: list[JobRecord]
    """One for each job, in order of arrival."""
    counters: EngineCounters
    policy: str
    """Name and derived parameters."""
    ended_s: float
    """Virtual time at which the last job ended; the trace begins at 0."""
    token_gaps_s: array[float]
    """Seconds from each token of a job to its next one, of all jobs."""


def simulate(
    trace: Sequence[TraceJob],
    scheduler: SchedulerSection,
    kv_cache: KVCacheSection,
    latency: LatencyModel,
    memory: KVMemory,
    *,
    max_model_len: int,
    predictions: Sequence[int] | None = None,
    policy_of: PolicyOfLimits | None = None,
    check_integrity: bool = False,
) -> Simulation:
    """Serve ``trace``, in order of arrival, with output lengths forced to the trace's.

    Deterministic: the same arguments give the same result to the last bit.

    Args:
        predictions: for each job, how many output tokens it is predicted to have; the policy learns
            of it when the job arrives. Default: nothing is predicted.
        policy_of: makes a policy that the registry does not have, for the limits of ``scheduler``.

    Raises:
        ValueError: a job exceeds ``max_model_len`` or the KV blocks.
    """
    capacity = min(max_model_len, memory.num_blocks * kv_cache.block_size)
    if any(job.prompt_tokens + job.output_tokens > capacity for job in trace):
        raise ValueError(f"a job is longer than {capacity} tokens")
    clock = VirtualClock()
    executor = SimulatedExecutor(latency, clock, memory.link)
    kv_tokens = memory.num_blocks * kv_cache.block_size
    if policy_of is None:
        policy = make_policy(scheduler, latency, max_model_len=max_model_len, kv_tokens=kv_tokens)
    else:
        policy = policy_of(
            batch_limits(scheduler, latency, max_model_len=max_model_len, kv_tokens=kv_tokens)
        )
    counters = EngineCounters(LatencyHistograms(scheduler.slo_ms / 1e3))
    tiers = TwoTierKV(
        memory.num_blocks,
        memory.num_host_blocks if kv_cache.is_swapping else 0,
        kv_cache.block_size,
        incremental=kv_cache.incremental,
    )
    costs = SwapCosts(latency, memory.block_bytes, memory.link)
    tokens = _TokenTimes(clock)
    loop = StepLoop(
        policy,
        KVManager(tiers, policy, _without_prefixes(kv_cache), costs, counters),
        executor,
        tokens,
        clock,
        eos_token_ids=(),
        counters=counters,
        predict_s=lambda step: latency.iteration_s(IterationLoad.of_step(step)),
        on_end=_ignore_end,
        on_iteration=_ignore_iteration,
        check_integrity=check_integrity,
    )
    jobs = [_job(number, traced) for number, traced in enumerate(trace)]
    arrivals = deque(jobs)
    while arrivals or not loop.is_idle:
        while arrivals and arrivals[0].arrival_s <= clock.now():
            job = arrivals.popleft()
            loop.add(job)
            if predictions is not None:
                loop.predicted(job.number, predictions[job.number])
        executor.wake_s = arrivals[0].arrival_s if arrivals else math.inf
        if loop.is_idle:
            clock.advance_to(executor.wake_s)
        else:
            loop.turn()
    return Simulation(
        [_record(job, latency) for job in jobs],
        counters,
        policy.describe(),
        clock.now(),
        tokens.gaps_s,
    )


class _TokenTimes:
    """In place of delivery: notes when tokens come. Nobody reads them."""

    is_empty = True

    def __init__(self, clock: VirtualClock) -> None:
        self.gaps_s = array("d")
        self._clock = clock
        self._last_s: dict[int, float] = {}  # by job

    def open(self, job: Job) -> None:
        pass

    def add(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        now = self._clock.now()
        if job.number in self._last_s:
            self.gaps_s.append(now - self._last_s[job.number])
        self._last_s[job.number] = now

    def flush(self, on_end: OnEnd) -> None:
        pass

    def close(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        pass

    def close_all(self, reason: FinishReason, error: str) -> list[Job]:
        return []


def _ignore_end(job: Job, reason: FinishReason) -> None:
    """Jobs are read when all have ended."""


def _ignore_iteration(step: Step, elapsed_s: float) -> None:
    """The latency model is the truth here: there is nothing to correct."""


def _without_prefixes(kv_cache: KVCacheSection) -> KVCacheSection:
    """Jobs have lengths here, and no text of which any two could have the beginning in common."""
    return kv_cache.model_copy(update={"prefix_caching": False})


def _job(number: int, traced: TraceJob) -> Job:
    return Job(
        id=str(number),
        number=number,
        prompt_ids=array("i", bytes(4 * traced.prompt_tokens)),
        params=SamplingParams(max_tokens=traced.output_tokens, temperature=0, ignore_eos=True),
        arrival_s=traced.arrival_s,
    )


def _record(job: Job, latency: LatencyModel) -> JobRecord:
    assert job.first_scheduled_s is not None
    assert job.first_token_s is not None
    assert job.last_token_s is not None
    return JobRecord(
        arrival_s=job.arrival_s,
        first_scheduled_s=job.first_scheduled_s,
        first_token_s=job.first_token_s,
        last_token_s=job.last_token_s,
        prompt_tokens=len(job.prompt_ids),
        output_tokens=len(job.output_ids),
        num_preemptions=job.num_preemptions,
        executed_s=job.executed_s,
        swap_stall_s=job.swap_stall_s,
        alone_s=_alone_s(len(job.prompt_ids), len(job.output_ids), latency),
    )


def _alone_s(prompt_tokens: int, output_tokens: int, latency: LatencyModel) -> float:
    """Latency on an idle system; decode time grows evenly, so all decodes take the middle one's."""
    decodes = output_tokens - 1
    return latency.prefill_s(prompt_tokens) + decodes * latency.decode_s(
        prompt_tokens + 1 + decodes // 2
    )
