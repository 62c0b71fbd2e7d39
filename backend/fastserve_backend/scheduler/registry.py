"""Policies by name, built from the configuration and the latency profile."""

from __future__ import annotations

from fastserve_backend.config import SchedulerSection
from fastserve_backend.scheduler.base import IterationTimes, Policy
from fastserve_backend.scheduler.batch_limits import batch_limits
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.fixed_priority import FixedPriority
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.mlfq import MLFQ, Quanta
from fastserve_backend.scheduler.sarathi_edf import SarathiEDF
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from fastserve_backend.scheduler.speculative import Speculative
from fastserve_backend.scheduler.srpt import SRPT
from fastserve_backend.scheduler.uniboost import UniBoost

# Tokens of KV memory that is never short.
UNLIMITED_KV = 2**40
# starvation_ms: auto, in units of slo_ms. Half as much makes jobs with long prompts starve near
# capacity, where they would soon have run anyhow, and their turns delay all others
# (docs/scheduling.md). Ten times as much costs the tail (docs/paper_results.md).
STARVATION_TOKENS = 200
# Of ``sarathi_edf``: when a first token is due, in units of slo_ms.
FIRST_TOKEN_SLOS = 10
# Of ``speculative``: seconds of remaining time that a second since a job's arrival makes up for.
# Under overload 0.03 costs the tail 5%, 0.3 the mean a quarter to a third (docs/speculative.md).
AGING = 0.1


def make_policy(
    config: SchedulerSection,
    times: IterationTimes,
    max_model_len: int,
    kv_tokens: int = UNLIMITED_KV,
) -> Policy:
    """The policy that ``config.policy`` names; derived values come from ``times`` and the SLO.

    Args:
        kv_tokens: tokens whose K and V the device holds.
    """
    limits = batch_limits(config, times, max_model_len=max_model_len, kv_tokens=kv_tokens)
    if config.policy == "fcfs":
        return FCFS(limits)
    if config.policy == "fixed_priority":
        return FixedPriority(limits)
    if config.policy == "srpt":
        return SRPT(limits, times)
    if config.policy == "sarathi_edf":
        slo_s = config.slo_ms / 1e3
        return SarathiEDF(limits, first_token_s=FIRST_TOKEN_SLOS * slo_s, token_s=slo_s)
    if config.policy == "uniboost":
        return UniBoost(limits, times)
    if config.policy == "gittins":
        return Gittins(
            limits,
            times,
            max_model_len=max_model_len,
            kv_tokens=kv_tokens,
            objective=config.objective,
            starvation_s=_starvation_s(config),
        )
    quanta = _quanta(config, times, max_model_len)
    if config.policy == "mlfq":
        return MLFQ(limits, quanta, times)
    if config.policy == "speculative":
        return Speculative(limits, quanta, times, AGING)
    return SkipJoinMLFQ(limits, quanta, times)


def _quanta(config: SchedulerSection, times: IterationTimes, max_model_len: int) -> Quanta:
    base_ms = config.base_quantum_ms
    return Quanta(
        base_s=lambda: times.decode_s(1) if base_ms == "auto" else base_ms / 1e3,
        ratio=config.quantum_ratio,
        longest_job_s=max(
            times.prefill_s(max_model_len), max_model_len * times.decode_s(max_model_len)
        ),
        starvation_s=_starvation_s(config),
    )


def _starvation_s(config: SchedulerSection) -> float:
    starvation_ms = config.starvation_ms
    if starvation_ms == "auto":
        starvation_ms = config.slo_ms * STARVATION_TOKENS
    return starvation_ms / 1e3
