"""What the records of one run say about a system, in few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """From the first arrival to the last token."""
    jobs_per_s: float
    """Finished jobs over the duration: below the offered rate when the system falls behind."""
    output_tokens_per_s: float
    normalized_latency_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution | None
    """Over the jobs that have more than one output token; ``None`` where no job has."""
    latency_s: Distribution
    """Job completion time (JCT)."""
    queueing_share: float
    """Time spent waiting by all jobs over the sum of their latencies."""
    longest_tenth_slowdown: float | None
    """Mean slowdown of the tenth of jobs that take longest alone: what preemption costs them.

    ``None`` unless the latency on an idle system is known of every job.
    """
    preemptions_per_job: float


def summarize(records: Sequence[JobRecord]) -> Summary:
    """The summary of one run.

    Raises:
        WorkloadError: no job finished.
    """
    columns = _Columns(records)
    latency_s = columns.last_token_s - columns.arrival_s
    queueing_s = np.clip(latency_s - columns.executed_s, 0, latency_s)
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
        queueing_share=float(queueing_s.sum() / latency_s.sum()),
        longest_tenth_slowdown=_longest_tenth_slowdown(latency_s, columns.alone_s),
        preemptions_per_job=float(columns.num_preemptions.mean()),
    )


def attainment(records: Sequence[JobRecord], ttft_slo_s: float, tpot_slo_s: float) -> float:
    """Share of jobs, 0 … 1, that meet both objectives; a single token has no TPOT to miss.

    The rate at which this falls to 0.95 is the P95 goodput (FastServe §6.2, Fig. 13).

    Raises:
        WorkloadError: no job finished.
    """
    columns = _Columns(records)
    met = columns.first_token_s - columns.arrival_s <= ttft_slo_s
    met[columns.has_tpot] &= columns.tpot_s() <= tpot_slo_s
    return float(met.mean())


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
                    record.num_preemptions,
                    record.executed_s,
                    math.nan if record.alone_s is None else record.alone_s,
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
        self.has_tpot = self.output_tokens > 1

    def tpot_s(self) -> NDArray[np.float64]:
        """Of the jobs where ``has_tpot``."""
        decode_s = (self.last_token_s - self.first_token_s)[self.has_tpot]
        times: NDArray[np.float64] = decode_s / (self.output_tokens[self.has_tpot] - 1)
        return times


def _longest_tenth_slowdown(
    latency_s: NDArray[np.float64], alone_s: NDArray[np.float64]
) -> float | None:
    if np.isnan(alone_s).any():
        return None
    longest = np.argsort(alone_s, kind="stable")[-math.ceil(len(alone_s) / 10) :]
    return float((latency_s[longest] / alone_s[longest]).mean())
