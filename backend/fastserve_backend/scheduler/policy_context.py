"""What a policy is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fastserve_backend.config_sections import SchedulerSection
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Policy,
    time_to_next_token,
)
from fastserve_backend.scheduler.batch_limits import batch_limits, scored_chunks, seats
from fastserve_backend.scheduler.fair_shares import FairShares
from fastserve_backend.scheduler.gittins_index import Capacity
from fastserve_backend.scheduler.learned_lengths import LearnedLengths
from fastserve_backend.scheduler.priority_classes import PriorityClasses
from fastserve_backend.scheduler.promotion import Promotion
from fastserve_backend.scheduler.registry import load_policy

_NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """All that any policy's ``from_config`` may need."""

    config: SchedulerSection
    limits: BatchLimits
    """Of each batch, from the configuration and the latency profile. One object for all policies;
    its ``max_seqs`` may change before a ``recalibrate``."""
    times: IterationTimes
    """How long iterations take; its answers follow the hardware as it drifts."""
    max_model_len: int
    """Most tokens of one job, prompt and output."""
    kv_tokens: int
    """Tokens whose K and V the device holds."""
    learned: LearnedLengths
    """What the policies of all priorities learn about output lengths, together."""


def make_policy(
    config: SchedulerSection,
    times: IterationTimes,
    max_model_len: int,
    kv_tokens: int,
    weights: Mapping[str, float] | None = _NO_WEIGHTS,
) -> Policy:
    """The policy that ``config.policy`` names, one for each priority in use.

    Derived values come from ``times`` and the SLO. ``recalibrate`` derives the seats and
    ``scored_chunks`` anew. There are more seats if iterations have become faster, but never fewer
    than at the start. A machine that other processes slow down would only become slower with fewer
    seats.

    Args:
        max_model_len, kv_tokens: as in ``PolicyContext``.
        weights: of tenants, as for ``FairShares``. None: tenants do not count.

    Raises:
        ConfigError: the policy cannot be loaded.
    """
    limits = batch_limits(config, times, max_model_len=max_model_len, kv_tokens=kv_tokens)
    least_seats = limits.max_seqs
    learned = LearnedLengths(max_model_len, config.objective, Capacity(limits.max_seqs, kv_tokens))
    context = PolicyContext(config, limits, times, max_model_len, kv_tokens, learned)
    policy_class = load_policy(config.policy)
    across = None
    if config.priority_starvation_ms is not None:
        starvation_s = config.priority_starvation_ms / 1e3
        across = Promotion(starvation_s, lambda job: time_to_next_token(job, times))

    def of_all_tenants() -> Policy:
        return policy_class.from_config(context)

    def for_a_priority() -> Policy:
        if weights is None:
            return of_all_tenants()
        return FairShares(of_all_tenants(), times, weights, max_model_len)

    def derive_seats() -> None:
        now = seats(config, times, max_model_len=max_model_len, kv_tokens=kv_tokens)
        limits.max_seqs = max(least_seats, now)
        limits.scored_chunks = scored_chunks(limits, times)
        learned.use_capacity(Capacity(limits.max_seqs, kv_tokens))

    return PriorityClasses(for_a_priority, across, derive_seats)
