"""The engine's totals since its start, and its state at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastserve_backend.job import Job
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.metrics.objectives import attainment

MAX_NAMED_TENANTS = 100
"""Clients may name any tenants, but a metric should have few labels."""
OTHER_TENANTS = "other"
"""Stands for all tenants after the first ``MAX_NAMED_TENANTS``."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. Only the step loop's thread writes them."""

    latencies: LatencyHistograms = field(compare=False)
    prompt_tokens: int = 0
    prefix_cached_tokens: int = 0
    """Prompt tokens that were not computed, because their KV was kept."""
    session_hit_tokens: int = 0
    """Prompt tokens of sessions' turns whose KV was held for them."""
    session_miss_tokens: int = 0
    """All other prompt tokens of sessions' turns."""
    generation_tokens: int = 0
    iterations: int = 0
    compute_s: float = 0.0
    """Seconds that the ranks computed."""
    iteration_s: float = 0.0
    """Seconds from sending a step, or from the end of the step before it if that is later, to its
    tokens, without waits between stages. The excess over ``compute_s`` is messages and making
    inputs."""
    between_s: float = 0.0
    """Seconds from a step's tokens to sending the next step, in which the ranks were idle."""
    preemptions: int = 0
    recomputed_jobs: int = 0
    """Jobs whose KV was dropped because blocks were short, and was computed again."""
    peak_blocks: int = 0
    """Most KV blocks of the device in use at once."""
    swap_out_bytes: int = 0
    """KV copied from device to host, by swap-outs and ahead of them."""
    swap_in_bytes: int = 0
    swap_avoided_bytes: int = 0
    """KV that swap-outs did not copy, because the host had it already."""
    swap_stall_s: float = 0.0
    """Seconds in which no step ran because all runnable jobs waited for copies."""
    disk_write_bytes: int = 0
    """KV of paused sessions that was written to the disk."""
    disk_read_bytes: int = 0
    disk_failures: int = 0
    """Writes and reads that failed, and reads that took too long."""
    finished: Counter[str] = field(default_factory=Counter)
    """Jobs by finish reason, without refused jobs."""
    refused: int = 0
    """Jobs rejected after admission, such as those with an invalid grammar."""
    slo_attained: Counter[str] = field(default_factory=Counter)
    """Completed jobs that kept an objective, by the objective: ``ttft`` or ``tpot``."""
    slo_missed: Counter[str] = field(default_factory=Counter)
    """Completed jobs that missed it."""
    tenant_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt and output tokens by tenant. It has ``OTHER_TENANTS`` if there are many."""
    worker_restarts: int = 0
    """How often all ranks were restarted because one died or hung."""

    def on_job_added(self, job: Job) -> None:
        """A new job, with its prompt."""
        num_tokens = len(job.prompt_ids)
        self.prompt_tokens += num_tokens
        self._count_for_tenant(job, num_tokens)

    def on_token(self, job: Job, now: float) -> None:
        """The job has a new token; ``last_token_s`` is still that of the token before."""
        self.latencies.on_token(job, now)
        self.generation_tokens += 1
        self._count_for_tenant(job, 1)

    def on_job_completed(self, job: Job) -> None:
        """The job has all its tokens, at least one."""
        self.latencies.on_job_completed(job)
        for objective, is_kept in attainment(job)._asdict().items():
            if is_kept is not None:
                (self.slo_attained if is_kept else self.slo_missed)[objective] += 1

    def _count_for_tenant(self, job: Job, num_tokens: int) -> None:
        tenant = job.service.tenant
        if tenant not in self.tenant_tokens and len(self.tenant_tokens) >= MAX_NAMED_TENANTS:
            tenant = OTHER_TENANTS
        self.tenant_tokens[tenant] += num_tokens


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one moment."""

    running: int
    waiting: int
    level_sizes: tuple[int, ...]
    """Jobs in each queue of the policy, highest first."""
    num_demotions: int
    """Since the start; see ``Policy``."""
    num_promotions: int
    """Since the start; see ``Policy``."""
    priority_jobs: Mapping[int, int]
    """Jobs by priority; priorities without jobs are left out."""
    swapped: int
    """Waiting jobs whose KV is on the host, or on its way from or to it."""
    block_size: int
    """Tokens of a block."""
    num_groups: int
    """Blocks that hold the same ``block_size`` tokens: one of each group of layers."""
    num_blocks: int
    free_blocks: int
    shared_blocks: int
    """Device blocks that several jobs have."""
    num_host_blocks: int
    free_host_blocks: int
    """Free blocks include those that sessions hold, since jobs get them at once."""
    shared_host_blocks: int
    sessions_held: int
    """Paused sessions whose KV is held."""
    held_blocks: int
    """Device blocks of held KV."""
    held_host_blocks: int
    held_disk_blocks: int
    """Slots of the disk in use, also for KV that is on the host too."""
