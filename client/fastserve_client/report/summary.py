"""What the records of one run say about a system, in few numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastserve_client.errors import WorkloadError
from fastserve_client.report.records import JobRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles over jobs; between two jobs a percentile is interpolated linearly."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Distribution:
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(float(values.mean()), p50, p95, p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Times are seconds; jobs count alike, however many tokens they have."""

    num_jobs: int
    duration_s: float
    """From the first arrival to the last token, or to the last failure if that came later."""
    jobs_per_s: float
    """Finished jobs over the duration: below the offered rate when the system falls behind."""
    output_tokens_per_s: float
    normalized_latency_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution | None
    """Over the jobs that have more than one output token; ``None`` where no job has."""
    latency_s: Distribution
    """Job completion time (JCT)."""
    queueing_share: float | None
    """Time spent waiting by all jobs over the sum of their latencies.

    ``None``, as in what follows, unless it is known of every job.
    """
    longest_tenth_slowdown: float | None
    """Mean of latency over latency on an idle system, of the tenth of jobs that take longest there:
    what preemption costs them."""
    preemptions_per_job: float | None


def summarize(records: Sequence[JobRecord], duration_s: float | None = None) -> Summary:
    """The summary of one run.

    Args:
        duration_s: Of the run, where jobs without records count too; ``None``: from the first
            arrival to the last token.

    Raises:
        WorkloadError: no job finished.
    """
    columns = _Columns(records)
    latency_s = columns.last_token_s - columns.arrival_s
    if duration_s is None:
        duration_s = float(columns.last_token_s.max() - columns.arrival_s.min())
    tpot_s = columns.tpot_s()
    return Summary(
        num_jobs=len(records),
        duration_s=duration_s,
        jobs_per_s=len(records) / duration_s,
        output_tokens_per_s=float(columns.output_tokens.sum()) / duration_s,
        normalized_latency_s=Distribution.of(latency_s / columns.output_tokens),
        ttft_s=Distribution.of(columns.first_token_s - columns.arrival_s),
        tpot_s=Distribution.of(tpot_s) if tpot_s.size else None,
        latency_s=Distribution.of(latency_s),
        queueing_share=_queueing_share(latency_s, columns.executed_s),
        longest_tenth_slowdown=_longest_tenth_slowdown(latency_s, columns.alone_s),
        preemptions_per_job=_known(float(columns.num_preemptions.mean())),
    )


def median_summary(summaries: Sequence[Summary]) -> Summary:
    """Of repeated runs: the median of each number by itself.

    A number that one of them lacks is ``None``.

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


class _Columns:
    """The fields of all records as arrays of ``[jobs]`` doubles."""

    def __init__(self, records: Sequence[JobRecord]) -> None:
        if not records:
            raise WorkloadError("records: got none; a report needs at least one finished job")
        rows = np.array(
            [
                (
                    record.arrival_s,
                    record.first_token_s,
                    record.last_token_s,
                    record.output_tokens,
                    _or_nan(record.num_preemptions),
                    _or_nan(record.executed_s),
                    _or_nan(record.alone_s),
                )
                for record in records
            ],
            dtype=np.float64,
        )
        (
            self.arrival_s,
            self.first_token_s,
            self.last_token_s,
            self.output_tokens,
            self.num_preemptions,
            self.executed_s,
            self.alone_s,
        ) = rows.T

    def tpot_s(self) -> NDArray[np.float64]:
        """Of the jobs that have more than one token."""
        several = self.output_tokens > 1
        decode_s = (self.last_token_s - self.first_token_s)[several]
        times: NDArray[np.float64] = decode_s / (self.output_tokens[several] - 1)
        return times


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _known(value: float) -> float | None:
    """``None`` for NaN, which any unknown value makes of a mean or a sum."""
    return None if math.isnan(value) else value


def _queueing_share(
    latency_s: NDArray[np.float64], executed_s: NDArray[np.float64]
) -> float | None:
    queueing_s = np.clip(latency_s - executed_s, 0, latency_s)
    return _known(float(queueing_s.sum() / latency_s.sum()))


def _longest_tenth_slowdown(
    latency_s: NDArray[np.float64], alone_s: NDArray[np.float64]
) -> float | None:
    if np.isnan(alone_s).any():
        return None
    longest = np.argsort(alone_s, kind="stable")[-math.ceil(len(alone_s) / 10) :]
    return float((latency_s[longest] / alone_s[longest]).mean())
