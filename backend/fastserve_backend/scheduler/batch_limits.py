"""Derives from the profile the bounds of an iteration that the configuration leaves ``auto``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from fastserve_backend.config_sections import SchedulerSection
from fastserve_backend.scheduler.base import BatchLimits, ChunkSizes, IterationTimes

# An iteration may take this share of slo_ms, which leaves a job the rest for the queue.
_ITERATION_SHARE = 1 / 3
# It may always take as long as this many decodes of one job, so that half of it can be prefill.
_MOST_DECODES = 2.0
# With the smallest chunk, an iteration takes as long as this many decodes. That is about the knee
# of the profile, where computing tokens takes as long as reading the weights.
_KNEE_DECODES = 1.25
# Ratio of a chunk size to the next smaller one.
_SIZE_RATIO = 2**0.5
# Tokens of KV memory that a seat needs at least: a short prompt and its answer.
_SEAT_TOKENS = 64


def batch_limits(
    config: SchedulerSection, times: IterationTimes, *, max_model_len: int, kv_tokens: int
) -> BatchLimits:
    """The limits that ``config`` sets; for ``auto``, those that the profile and KV memory allow.

    Args:
        kv_tokens: tokens whose K and V the device can hold.
    """
    max_tokens = config.max_num_batched_tokens
    longest_s = max(_MOST_DECODES * times.decode_s(1), _ITERATION_SHARE * config.slo_ms / 1e3)
    max_seqs = config.max_num_seqs
    if max_seqs == "auto":
        max_seqs = _auto_seqs(config.most_seqs, times, longest_s, max_model_len, kv_tokens)
    chunk = config.prefill_chunk_tokens
    if chunk == "whole":
        # Without chunks, a prompt longer than an iteration could never run.
        return BatchLimits(max_seqs, max_tokens, max_tokens if max_tokens < max_model_len else None)
    most = max(1, max_tokens - (max_seqs - 1))  # each other job can still decode a token
    if chunk != "auto":
        return BatchLimits(max_seqs, max_tokens, min(chunk, most))
    largest = _largest(most, times.prefill_s, longest_s)
    smallest = _largest(most, times.prefill_s, _KNEE_DECODES * times.decode_s(1))
    return BatchLimits(max_seqs, max_tokens, largest, _chunk_sizes(times, smallest, largest))


def _auto_seqs(
    most: int, times: IterationTimes, longest_s: float, max_model_len: int, kv_tokens: int
) -> int:
    """How many jobs decode within ``longest_s`` while they fill the KV memory."""

    def decodes_s(num_jobs: int) -> float:
        return times.decodes_s(num_jobs, min(max_model_len, max(1, kv_tokens // num_jobs)))

    by_memory = max(1, kv_tokens // min(max_model_len, _SEAT_TOKENS))
    return _largest(min(most, by_memory), decodes_s, longest_s)


def _chunk_sizes(times: IterationTimes, smallest: int, largest: int) -> ChunkSizes | None:
    sizes = {largest}
    size = float(smallest)
    while size < largest:
        sizes.add(round(size))
        size *= _SIZE_RATIO
    if len(sizes) == 1:
        return None
    seconds = {size: times.prefill_s(size) for size in sorted(sizes)}
    return ChunkSizes(seconds, times.decode_s(1))


def _largest(most: int, seconds: Callable[[int], float], limit_s: float) -> int:
    """The largest number from 1 to ``most`` that takes no longer than ``limit_s``; at least 1.

    Args:
        seconds: how long a number takes; it never decreases.
    """
    return max(1, bisect_right(range(1, most + 1), limit_s, key=seconds))
