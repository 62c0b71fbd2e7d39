"""The engine's totals since its start, and its state at one moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fastserve_backend.metrics.latency_histograms import LatencyHistograms


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. Only the step loop's thread writes them."""

    latencies: LatencyHistograms = field(compare=False)
    prompt_tokens: int = 0
    prefix_cached_tokens: int = 0
    """Prompt tokens that were not computed, because their KV was kept."""
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
    finished: Counter[str] = field(default_factory=Counter)
    """Jobs by finish reason, without refused jobs."""
    refused: int = 0
    """Jobs rejected after admission, such as those with an invalid grammar."""
    worker_restarts: int = 0
    """How often all ranks were restarted because one died or hung."""


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
    swapped: int
    """Waiting jobs whose KV is on the host, or on its way from or to it."""
    num_blocks: int
    free_blocks: int
    num_host_blocks: int
    free_host_blocks: int
