"""Policies by name, built from the configuration and the latency profile."""

from __future__ import annotations

from fastserve_backend.config import SchedulerSection
from fastserve_backend.scheduler.base import BatchLimits, IterationTimes, Policy
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ

# starvation_ms: auto. A job keeps its SLO if it waits at most slo_ms for each token it ends up
# with, and a job that sank low enough to starve is one that produces tens of tokens; promoting
# after one token's worth of waiting would promote everything under overload, which is FCFS.
STARVATION_TOKENS = 10


def make_policy(config: SchedulerSection, times: IterationTimes, max_model_len: int) -> Policy:
    """The policy that ``config.policy`` names; derived values come from ``times`` and the SLO."""
    limits = BatchLimits(config.max_num_seqs, config.max_num_batched_tokens)
    if config.policy == "fcfs":
        return FCFS(limits)
    base_ms = config.base_quantum_ms
    starvation_ms = config.starvation_ms
    return SkipJoinMLFQ(
        limits,
        times,
        base_quantum_s=times.decode_s(1) if base_ms == "auto" else base_ms / 1e3,
        quantum_ratio=config.quantum_ratio,
        starvation_s=(
            config.slo_ms * STARVATION_TOKENS if starvation_ms == "auto" else starvation_ms
        )
        / 1e3,
        longest_prefill_s=times.prefill_s(max_model_len),
    )
