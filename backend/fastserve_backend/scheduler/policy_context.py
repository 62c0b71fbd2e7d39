"""What a policy is built from."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_backend.config import SchedulerSection
from fastserve_backend.scheduler.base import BatchLimits, IterationTimes, Policy
from fastserve_backend.scheduler.batch_limits import batch_limits
from fastserve_backend.scheduler.registry import load_policy


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """All that any policy's ``from_config`` may need."""

    config: SchedulerSection
    limits: BatchLimits
    """Of each batch, from the configuration and the latency profile."""
    times: IterationTimes
    """How long iterations take; its answers follow the hardware as it drifts."""
    max_model_len: int
    """Most tokens of one job, prompt and output."""
    kv_tokens: int
    """Tokens whose K and V the device holds."""


def make_policy(
    config: SchedulerSection, times: IterationTimes, max_model_len: int, kv_tokens: int
) -> Policy:
    """The policy that ``config.policy`` names; derived values come from ``times`` and the SLO.

    Args:
        max_model_len, kv_tokens: as in ``PolicyContext``.

    Raises:
        ConfigError: the policy cannot be loaded.
    """
    limits = batch_limits(config, times, max_model_len=max_model_len, kv_tokens=kv_tokens)
    context = PolicyContext(config, limits, times, max_model_len, kv_tokens)
    return load_policy(config.policy).from_config(context)
