"""Derives from the profile the bounds of an iteration that the configuration leaves ``auto``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from fastserve_backend.config_sections import SchedulerSection
from fastserve_backend.scheduler.base import BatchLimits, ChunkSizes, IterationTimes

# An iteration may take this share of slo_ms, which leaves a job the rest for the queue.
_ITERATION_SHARE = 1 / 3
# It may always take as long as this many decodes of one job: with fewer seats, jobs would take
# turns, and each would wait as long for its token. And half of it can be prefill.
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
    limits = _limits(config, times, max_model_len, kv_tokens)
    most_seats = _most_seats(config, max_model_len, kv_tokens)
    return replace(
        limits,
        bound_by_times=limits.max_seqs < most_seats,
        scored_chunks=scored_chunks(limits, times),
    )


def scored_chunks(limits: BatchLimits, times: IterationTimes) -> dict[int, int]:
    """``BatchLimits.scored_chunks`` for all sizes that the limits allow.

    Such a chunk may take as long as the smallest automatic one. Otherwise a small chunk, or a
    profile from a busy machine, would leave it a single token.
    """
    if limits.prefill_chunk_tokens is None:
        return {}
    sizes = limits.chunk_sizes.seconds if limits.chunk_sizes else (limits.prefill_chunk_tokens,)

    def scored_s(num_tokens: int) -> float:
        return times.prefill_s(num_tokens) + times.score_s(num_tokens)

    least_s = _KNEE_DECODES * times.decode_s(1)
    return {size: _largest(size, scored_s, max(least_s, times.prefill_s(size))) for size in sizes}


def _limits(
    config: SchedulerSection, times: IterationTimes, max_model_len: int, kv_tokens: int
) -> BatchLimits:
    max_tokens = config.max_num_batched_tokens
    max_seqs = seats(config, times, max_model_len=max_model_len, kv_tokens=kv_tokens)
    chunk = config.prefill_chunk_tokens
    if chunk == "whole":
        # Without chunks, a prompt longer than an iteration could never run.
        return BatchLimits(max_seqs, max_tokens, max_tokens if max_tokens < max_model_len else None)
    # Each other job can still decode a token, also if there are more seats later.
    most_seats = _most_seats(config, max_model_len, kv_tokens)
    most = max(1, max_tokens - (most_seats - 1))
    if chunk != "auto":
        return BatchLimits(max_seqs, max_tokens, min(chunk, most))
    longest_s = max(_MOST_DECODES * times.decode_s(1), _ITERATION_SHARE * config.slo_ms / 1e3)
    largest = _largest(most, times.prefill_s, longest_s)
    smallest = _largest(most, times.prefill_s, _KNEE_DECODES * times.decode_s(1))
    return BatchLimits(max_seqs, max_tokens, largest, _chunk_sizes(times, smallest, largest))


def seats(
    config: SchedulerSection, times: IterationTimes, *, max_model_len: int, kv_tokens: int
) -> int:
    """Most jobs of an iteration: ``max_num_seqs``, or how many decode in time while they fill the
    KV memory. However slow the machine is, there are two seats if the memory has them, unless a
    second job makes a decode take more than twice as long.

    Args:
        kv_tokens: as of ``batch_limits``.
    """
    if config.max_num_seqs != "auto":
        return config.max_num_seqs

    def excess_s(num_jobs: int) -> float:
        """By how much too long the iteration takes. It grows with the jobs."""
        context = min(max_model_len, max(1, kv_tokens // num_jobs))
        longest_s = max(
            _MOST_DECODES * times.decode_s(context), _ITERATION_SHARE * config.slo_ms / 1e3
        )
        return times.decodes_s(num_jobs, context) - longest_s

    return _largest(_most_seats(config, max_model_len, kv_tokens), excess_s, 0.0)


def _most_seats(config: SchedulerSection, max_model_len: int, kv_tokens: int) -> int:
    """The most that ``seats`` returns, whatever the times are."""
    if config.max_num_seqs != "auto":
        return config.max_num_seqs
    by_memory = max(1, kv_tokens // min(max_model_len, _SEAT_TOKENS))
    return min(config.most_seqs, by_memory)


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
