"""Distributions of the times that clients wait; the step loop adds each value as it occurs.

An observation is a few list operations under a lock that is nearly always free. It takes well below
a microsecond, so every token can be observed. A publisher takes all values since it last did.
docs/metrics.md defines each distribution and explains its bounds.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_backend.job import Job

# Each bound is at most 2.5 times the one before, and so is the error of an interpolated quantile.
_FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_INTER_TOKEN_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 25, 60)
_WHOLE_JOB_BOUNDS_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
# In units of the SLO. The SLO is a bound itself, so the share of jobs that keep it is exact.
_NORMALIZED_BOUNDS_SLO = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 25)


@dataclass(frozen=True, slots=True)
class Observations:
    """Number and sum of the values in each bucket. The last bucket is above the last bound."""

    counts: tuple[int, ...]
    sums: tuple[float, ...]


class Histogram:
    """Values by bucket. ``observe`` and ``take`` may be called by different threads.

    Args:
        bounds: upper bounds of the buckets, inclusive, ascending, in the unit of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._clear()

    def observe(self, value: float) -> None:
        bucket = bisect_left(self.bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sums[bucket] += value

    def take(self) -> Observations:
        """The observations since the last call."""
        with self._lock:
            taken = Observations(tuple(self._counts), tuple(self._sums))
            self._clear()
        return taken

    def _clear(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)
        self._sums = [0.0] * (len(self.bounds) + 1)


class LatencyHistograms:
    """The five distributions of one engine.

    Args:
        slo_s: wanted normalized latency, seconds a token.
    """

    def __init__(self, slo_s: float) -> None:
        self.time_to_first_token = Histogram(_FIRST_TOKEN_BOUNDS_S)
        self.inter_token = Histogram(_INTER_TOKEN_BOUNDS_S)
        self.e2e = Histogram(_WHOLE_JOB_BOUNDS_S)
        self.queue = Histogram(_WHOLE_JOB_BOUNDS_S)
        # Rounded, because the bounds become labels, and 0.35 times 0.3 is not quite 0.105.
        self.normalized_latency = Histogram(
            [round(share * slo_s, 9) for share in _NORMALIZED_BOUNDS_SLO]
        )

    def on_token(self, job: Job, now: float) -> None:
        """The job has a new token; ``last_token_s`` is still that of the token before."""
        if job.last_token_s is None:
            self.time_to_first_token.observe(now - job.arrival_s)
        else:
            self.inter_token.observe(now - job.last_token_s)

    def on_job_completed(self, job: Job) -> None:
        """The job has all its tokens, at least one."""
        assert job.last_token_s is not None
        latency_s = job.last_token_s - job.arrival_s
        self.e2e.observe(latency_s)
        self.queue.observe(max(0.0, latency_s - job.executed_s))
        self.normalized_latency.observe(latency_s / len(job.output_ids))
