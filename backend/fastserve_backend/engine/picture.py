"""The engine's state at one moment: a picture for watchers, a snapshot for metrics."""

from __future__ import annotations

from itertools import chain, islice

from fastserve_client.engine_state import (
    MAX_LISTED_JOBS,
    EngineState,
    LevelState,
    ListedJob,
    PriorityState,
    State,
    TierState,
    Totals,
)

from fastserve_backend.engine.step_loop import StepLoop
from fastserve_backend.job import Job, JobState
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import TransferKind
from fastserve_backend.metrics.counters import EngineCounters, EngineSnapshot
from fastserve_backend.metrics.objectives import lateness_s
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.scheduler.base import Policy

_RUNNING = JobState.RUNNING


def take_picture(
    now: float,
    policy_name: str,
    loop: StepLoop,
    counters: EngineCounters,
    latency: LatencyModel,
) -> EngineState:
    """The engine between two cycles; only for the thread that runs them. Immutable.

    Lists ``MAX_LISTED_JOBS`` jobs at most, running ones first. Costs O(unfinished jobs).

    Args:
        now: seconds of the engine's clock.
    """
    policy, tiers, held = loop.policy, loop.kv.tiers, loop.kv.tiers.held
    running = [job for job in loop.jobs if job.state is _RUNNING]
    others = (job for job in loop.jobs if job.state is not _RUNNING)
    listed = islice(chain(running, others), MAX_LISTED_JOBS)
    return EngineState(
        time_s=now,
        policy=policy_name,
        policy_description=policy.describe(),
        levels=_levels(policy),
        jobs=tuple(_job(job, now, tiers) for job in listed),
        running=len(running),
        waiting=len(loop.jobs) - len(running),
        swapped=loop.kv.num_away,
        block_size=tiers.device.block_size,
        device=_tier(tiers.device, held.device),
        host=_tier(tiers.host, held.idle_host),
        totals=Totals(
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            iterations=counters.iterations,
            preemptions=counters.preemptions,
            demotions=policy.num_demotions,
            promotions=policy.num_promotions,
            swap_out_bytes=counters.swap_out_bytes,
            swap_in_bytes=counters.swap_in_bytes,
            worker_restarts=counters.worker_restarts,
            reused_prompt_tokens=counters.prefix_cached_tokens + counters.session_hit_tokens,
        ),
        priorities=tuple(
            PriorityState(priority, number)
            for priority, number in sorted(loop.jobs.count_by_priority().items())
        ),
        waiting_prompt_tokens=sum(
            job.num_uncomputed for job in loop.jobs if job.first_token_s is None
        ),
        prefill_tokens_per_s=_prefill_tokens_per_s(running, policy, latency),
        num_groups=tiers.needs.num_groups,
    )


def take_snapshot(loop: StepLoop, num_unfinished: int) -> EngineSnapshot:
    """The engine at any moment, from any thread; numbers may be of different steps.

    Args:
        num_unfinished: accepted jobs that have not ended, also those not in the loop yet.
    """
    policy, kv, num_running = loop.policy, loop.kv, loop.jobs.num_running
    device, host, held = kv.tiers.device, kv.tiers.host, kv.tiers.held
    return EngineSnapshot(
        running=num_running,
        waiting=max(0, num_unfinished - num_running),
        level_sizes=tuple(policy.level_sizes()),
        num_demotions=policy.num_demotions,
        num_promotions=policy.num_promotions,
        priority_jobs=loop.jobs.count_by_priority(),
        swapped=kv.num_away,
        block_size=device.block_size,
        num_groups=kv.tiers.needs.num_groups,
        num_blocks=device.num_blocks,
        free_blocks=device.num_free + held.device,
        shared_blocks=device.num_shared,
        num_host_blocks=host.num_blocks,
        free_host_blocks=host.num_free + held.idle_host,
        shared_host_blocks=host.num_shared,
        sessions_held=kv.num_sessions_held,
        held_blocks=held.device,
        held_host_blocks=held.idle_host,
        held_disk_blocks=kv.tiers.disk.slots.num_used,
    )


def _prefill_tokens_per_s(running: list[Job], policy: Policy, latency: LatencyModel) -> float:
    """The speed of the largest chunks, each beside the decodes of the latest iteration."""
    chunk = policy.limits.job_tokens
    decodes = [(job.num_tokens - 1, 1, True) for job in running if job.first_token_s is not None]
    return chunk / latency.iteration_s(IterationLoad.of([*decodes, (0, chunk, True)]))


def _levels(policy: Policy) -> tuple[LevelState, ...]:
    levels = zip(policy.quanta_s, policy.level_sizes(), strict=True)
    return tuple(LevelState(quantum_s, size) for quantum_s, size in levels)


def _tier(pool: BlockPool, num_held: int) -> TierState:
    """
    Args:
        num_held: blocks that only paused sessions have.
    """
    return TierState(pool.num_used - num_held, pool.num_blocks, pool.num_shared)


def _job(job: Job, now: float, tiers: TwoTierKV) -> ListedJob:
    return ListedJob(
        number=job.number,
        state=_state(job, tiers),
        level=job.queue_level,
        prompt_tokens=len(job.prompt_ids),
        output_tokens=len(job.output_ids),
        device_blocks=tiers.device.num_alone(job.number),
        host_blocks=tiers.host.num_alone(job.number),
        waited_s=max(0.0, now - job.arrival_s - job.executed_s),
        num_preemptions=job.num_preemptions,
        priority=job.service.priority,
        tenant=job.service.tenant,
        ttft_slo_s=job.service.ttft_slo_s,
        tpot_slo_s=job.service.tpot_slo_s,
        late_s=lateness_s(job, now),
    )


def _state(job: Job, tiers: TwoTierKV) -> State:
    if job.state is _RUNNING:
        return "running"
    transfer = tiers.transfers.of(job.number)
    if transfer is not None and transfer.kind is TransferKind.SWAP_OUT:
        return "swapping_out"
    if transfer is not None and transfer.kind is TransferKind.SWAP_IN:
        return "swapping_in"
    if tiers.is_swapped_out(job.number):
        return "swapped"
    return "waiting" if job.state is JobState.WAITING else "preempted"
