"""Summarises the records of one run in a few numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from fastserve_client.errors import WorkloadError
from numpy.typing import NDArray

from fastserve_bench.report.records import JobRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles over jobs. Percentiles are interpolated linearly between jobs."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(float(np.mean(values)), p50, p95, p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Times are seconds. All jobs count alike, however many tokens they have."""

    num_jobs: int
    duration_s: float
    """From the first arrival to the last token, or to the last failure if that came later."""
    jobs_per_s: float
    """Finished jobs over the duration. Below the offered rate, the system falls behind."""
    output_tokens_per_s: float
    normalized_latency_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution | None
    """Over the jobs with more than one output token; ``None`` if there are none."""
    latency_s: Distribution
    """Job completion time (JCT)."""
    queueing_share: float | None
    """Waiting time of all jobs over the sum of their latencies.

    This field and the next ones are ``None`` unless every job has the value.
    """
    longest_tenth_slowdown: float | None
    """What preemption costs long jobs. It is the mean of latency over latency on an idle system,
    over the tenth of jobs that take longest there."""
    preemptions_per_job: float | None


def summarize(records: Sequence[JobRecord], duration_s: float | None = None) -> Summary:
    """The summary of one run.

    Args:
        duration_s: The run's duration, if jobs without records count too. ``None``: from the first
            arrival to the last token.

    Raises:
        WorkloadError: no job finished.
    """
    if not records:
        raise WorkloadError("records: got none; a report needs at least one finished job")
    if duration_s is None:
        last_s = max(job.last_token_s for job in records)
        duration_s = last_s - min(job.arrival_s for job in records)
    tpots_s = [job.tpot_s for job in records if job.tpot_s is not None]
    return Summary(
        num_jobs=len(records),
        duration_s=duration_s,
        jobs_per_s=len(records) / duration_s,
        output_tokens_per_s=sum(job.output_tokens for job in records) / duration_s,
        normalized_latency_s=Distribution.of([job.normalized_latency_s for job in records]),
        ttft_s=Distribution.of([job.ttft_s for job in records]),
        tpot_s=Distribution.of(tpots_s) if tpots_s else None,
        latency_s=Distribution.of([job.latency_s for job in records]),
        queueing_share=_queueing_share(records),
        longest_tenth_slowdown=_longest_tenth_slowdown(records),
        preemptions_per_job=_known(_column([job.num_preemptions for job in records]).mean()),
    )


def median_summary(summaries: Sequence[Summary]) -> Summary:
    """The summary of repeated runs: the median of each number by itself.

    A number that one of the runs lacks is ``None``.

    Args:
        summaries: At least one.
    """
    return cast("Summary", _median(summaries))


def _median(values: Sequence[Any]) -> Any:
    first: Any = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, int):
        return round(statistics.median(values))
    if isinstance(first, float):
        return statistics.median(values)
    names = [field.name for field in fields(first)]
    parts = {name: _median([getattr(value, name) for value in values]) for name in names}
    return type(first)(**parts)


def _column(values: Sequence[float | None]) -> NDArray[np.float64]:
    """One value for each job. If one is unknown, it is NaN, and so are mean and sum."""
    return np.array(values, dtype=np.float64)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _queueing_share(records: Sequence[JobRecord]) -> float | None:
    queueing_s = _column([job.queueing_s for job in records])
    return _known(queueing_s.sum() / _column([job.latency_s for job in records]).sum())


def _longest_tenth_slowdown(records: Sequence[JobRecord]) -> float | None:
    alone_s = _column([job.alone_s for job in records])
    if np.isnan(alone_s).any():
        return None
    longest = np.argsort(alone_s, kind="stable")[-math.ceil(len(records) / 10) :]
    latency_s = _column([job.latency_s for job in records])
    return float((latency_s[longest] / alone_s[longest]).mean())
