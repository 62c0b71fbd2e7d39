"""Run a trace through the engine's step loop, on a virtual clock and modelled ranks."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_bench.report.records import JobRecord
from fastserve_bench.workload import TraceJob

from fastserve_backend.config_sections import KVCacheSection, SchedulerSection
from fastserve_backend.engine.delivery import NewToken, OnJobEnd
from fastserve_backend.engine.loop_setup import KVMemory, LoopSetup, MakePolicy
from fastserve_backend.job import FinishReason, Job, ServiceLevel
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.profile.iteration import LatencyModel
from fastserve_backend.rank_protocol.layer_kinds import BlockNeeds
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.simulation.simulated_executor import SimulatedExecutor
from fastserve_backend.system.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of ``simulate``."""

    records: list[JobRecord]
    """One for each job, in order of arrival."""
    counters: EngineCounters
    policy: str
    """The policy's name and derived parameters."""
    ended_s: float
    """Virtual time at which the last job ended; the trace begins at 0."""
    token_gaps_s: array[float]
    """Seconds between consecutive tokens of a job, for all jobs."""


def simulate(
    trace: Sequence[TraceJob],
    scheduler: SchedulerSection,
    kv_cache: KVCacheSection,
    latency: LatencyModel,
    memory: KVMemory,
    *,
    max_model_len: int,
    rotary_switch: int | None = None,
    predictions: Sequence[int] | None = None,
    policy_of: MakePolicy | None = None,
    check_integrity: bool = False,
) -> Simulation:
    """Serve ``trace``. Each job makes exactly as many output tokens as the trace says.

    Deterministic: the same arguments give the same result to the last bit.

    Args:
        trace: in order of arrival.
        rotary_switch: of the model (``ModelConfig``).
        predictions: predicted output tokens of each job, which the policy learns when the job
            arrives. Default: no predictions.
        policy_of: makes a policy that the registry does not have, for the limits of ``scheduler``.
        check_integrity: verify the block tables after every cycle, for tests.

    Raises:
        ValueError: a job exceeds ``max_model_len`` or the KV blocks.
    """
    longest = min(max_model_len, longest_job(memory, kv_cache, scheduler))
    if any(job.prompt_tokens + job.output_tokens > longest for job in trace):
        raise ValueError(f"a job is longer than {longest} tokens")
    clock = VirtualClock()
    executor = SimulatedExecutor(latency, clock, memory.link)
    counters = EngineCounters(LatencyHistograms(scheduler.slo_ms / 1e3))
    tokens = _TokenTimes(clock)
    setup = LoopSetup(
        scheduler, _without_prefixes(kv_cache), latency, counters, max_model_len, rotary_switch
    )
    loop = setup.make_loop(
        memory,
        executor,
        tokens,
        clock,
        eos_token_ids=(),
        on_job_end=_ignore_end,
        on_step_finished=_ignore_step,
        policy_of=policy_of,
        check_integrity=check_integrity,
    )
    jobs = [_job(number, traced, scheduler) for number, traced in enumerate(trace)]
    arrivals = deque(jobs)
    while arrivals or not loop.is_idle:
        while arrivals and arrivals[0].arrival_s <= clock.now():
            job = arrivals.popleft()
            loop.jobs.add(job)
            if predictions is not None:
                loop.jobs.on_prediction(job.number, predictions[job.number])
        executor.wake_s = arrivals[0].arrival_s if arrivals else math.inf
        if loop.is_idle:
            clock.advance_to(executor.wake_s)
        else:
            loop.run_cycle()
    return Simulation(
        [_record(*one, latency) for one in zip(jobs, trace, strict=True)],
        counters,
        loop.policy.describe(),
        clock.now(),
        tokens.gaps_s,
    )


def longest_job(memory: KVMemory, kv_cache: KVCacheSection, scheduler: SchedulerSection) -> int:
    """Tokens of the longest job that the KV blocks hold."""
    needs = BlockNeeds(kv_cache.block_size, memory.kinds, scheduler.max_num_batched_tokens)
    return needs.longest_job(memory.num_blocks)


class _TokenTimes:
    """A ``Delivery`` without clients: notes the times between tokens."""

    is_empty = True

    def __init__(self, clock: VirtualClock) -> None:
        self.gaps_s = array("d")
        self._clock = clock
        self._last_s: dict[int, float] = {}  # by job

    def open_stream(self, job: Job) -> None:
        pass

    def add_token(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        now = self._clock.now()
        if job.number in self._last_s:
            self.gaps_s.append(now - self._last_s[job.number])
        self._last_s[job.number] = now

    def flush_tokens(self, on_job_end: OnJobEnd) -> None:
        pass

    def end_stream(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        pass

    def end_all_streams(self, reason: FinishReason, error: str) -> list[Job]:
        return []


def _ignore_end(job: Job, reason: FinishReason) -> None:
    """The jobs are read when all have ended."""


def _ignore_step(step: Step, elapsed_s: float) -> None:
    """Steps take exactly the time that the latency model predicts: there is nothing to correct."""


def _without_prefixes(kv_cache: KVCacheSection) -> KVCacheSection:
    """Simulated jobs have lengths but no text, so none can begin like another."""
    return kv_cache.model_copy(update={"prefix_caching": False})


def _job(number: int, traced: TraceJob, scheduler: SchedulerSection) -> Job:
    wanted = traced.service
    service = ServiceLevel(wanted.priority, wanted.ttft_slo_s, wanted.tpot_slo_s, wanted.tenant)
    return Job(
        id=str(number),
        number=number,
        prompt_ids=array("i", bytes(4 * traced.prompt_tokens)),
        params=SamplingParams(max_tokens=traced.output_tokens, temperature=0, ignore_eos=True),
        arrival_s=traced.arrival_s,
        service=service.with_default_objectives(scheduler.ttft_slo_ms, scheduler.tpot_slo_ms),
    )


def _record(job: Job, traced: TraceJob, latency: LatencyModel) -> JobRecord:
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
        service=traced.service,
    )


def _alone_s(prompt_tokens: int, output_tokens: int, latency: LatencyModel) -> float:
    """Latency on an idle system. Decode times grow evenly, so all count as the middle one's."""
    decodes = output_tokens - 1
    return latency.prefill_s(prompt_tokens) + decodes * latency.decode_s(
        prompt_tokens + 1 + decodes // 2
    )
