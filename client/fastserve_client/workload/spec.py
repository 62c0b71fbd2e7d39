"""What a user asks for: a data set, how many of its jobs, and how they are changed."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_client.errors import WorkloadError
from fastserve_client.workload.datasets import build_trace, load_lengths
from fastserve_client.workload.lengths import LengthLimits, scale_ratio
from fastserve_client.workload.trace import TraceJob, poisson_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of ``simulate`` and ``bench``, of which only the rate is open."""

    dataset: str
    """As of :func:`load_lengths`."""
    num_jobs: int
    seed: int
    limits: LengthLimits
    scale: float = 1.0
    """All lengths times this, before the limits."""
    length_ratio: float | None = None
    """Mean prompt over mean output, see :func:`scale_ratio`."""

    def trace(self, rate: float | None) -> list[TraceJob]:
        """The trace at ``rate`` jobs per second; ``None``: at the data set's own timestamps.

        Raises:
            WorkloadError: the data set or a number cannot be used.
        """
        if self.length_ratio is None:
            return build_trace(
                self.dataset,
                rate=rate,
                num_jobs=self.num_jobs,
                seed=self.seed,
                limits=self.limits,
                scale=self.scale,
            )
        if rate is None:
            raise WorkloadError("rates: got none; --length-ratio needs a rate")
        lengths = load_lengths(self.dataset, self.limits, scale=self.scale)
        lengths = scale_ratio(lengths, self.length_ratio, self.limits)
        return poisson_trace(lengths, rate, self.num_jobs, self.seed)
