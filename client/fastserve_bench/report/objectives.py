"""Service level objectives: which jobs meet them, and up to which rate they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_client.errors import WorkloadError

from fastserve_bench.report.records import JobRecord


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds in seconds. A job meets all of them or misses. ``None``: no such bound."""

    normalized_latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, job: JobRecord) -> bool:
        """Whether the job meets all bounds. A single token has no TPOT to miss."""
        pairs = (
            (job.normalized_latency_s, self.normalized_latency_s),
            (job.ttft_s, self.ttft_s),
            (job.tpot_s, self.tpot_s),
        )
        return all(bound is None or time is None or time <= bound for time, bound in pairs)


def attainment(
    records: Sequence[JobRecord], objectives: Objectives, *, num_failed: int = 0
) -> float:
    """Share of jobs, 0 … 1, that meet the objectives.

    The rate at which this falls to 0.95 is the P95 goodput (FastServe §6.2, Fig. 13).

    Args:
        num_failed: Failed jobs, which have no record and met nothing.

    Raises:
        WorkloadError: no job.
    """
    if not records and not num_failed:
        raise WorkloadError("records: got none; a report needs at least one finished job")
    return sum(map(objectives.met_by, records)) / (len(records) + num_failed)


def highest_rate(rates: Sequence[float], values: Sequence[float], limit: float) -> float:
    """The rate at which a growing value, such as a latency, passes a limit.

    Args:
        rates: Ascending, at least one.
        values: One for each rate; infinite if a system failed altogether.

    Returns:
        The rate at which the values first pass ``limit``, interpolated linearly between two rates.
        0 if the lowest rate passes it, infinite if none does.
    """
    for index, value in enumerate(values):
        if value > limit:
            if index == 0:
                return 0.0
            if math.isinf(value):
                return rates[index - 1]
            passed = (limit - values[index - 1]) / (value - values[index - 1])
            return rates[index - 1] + passed * (rates[index] - rates[index - 1])
    return math.inf
