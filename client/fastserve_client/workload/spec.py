"""What a user asks for: a data set, how many of its jobs, and how they are changed."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_client.errors import WorkloadError
from fastserve_client.workload.datasets import Jobs, load_jobs
from fastserve_client.workload.lengths import NO_LIMITS, LengthLimits, scale_ratio
from fastserve_client.workload.trace import TraceJob, poisson_trace, timestamp_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of ``simulate`` and ``bench``, of which only the rate is open."""

    dataset: str
    """As of :func:`load_lengths`."""
    num_jobs: int
    seed: int = 0
    limits: LengthLimits = NO_LIMITS
    scale: float = 1.0
    """All lengths times this, before the limits."""
    length_ratio: float | None = None
    """Mean prompt over mean output, see :func:`scale_ratio`."""

    def trace(self, rate: float | None) -> list[TraceJob]:
        """The trace at ``rate`` jobs per second; ``None``: at the data set's own timestamps.

        Of a data set with timestamps it has the first jobs, and nothing is random. All others, and
        those with another ratio of lengths, arrive as a Poisson process (see
        :func:`poisson_trace`).

        Raises:
            WorkloadError: the data set or a number cannot be used.
        """
        if self.length_ratio is not None and rate is None:
            raise WorkloadError("rates: got none; --length-ratio needs a rate")
        jobs = load_jobs(self.dataset, self.limits, self.scale)
        if self.length_ratio is not None:
            # Neither its texts nor its timestamps belong to these lengths.
            jobs = Jobs(scale_ratio(jobs.lengths, self.length_ratio, self.limits))
        if jobs.timestamps_s is None:
            if rate is None:
                raise WorkloadError(
                    f"rate: got none; {self.dataset} has no timestamps of its own, give --rates, "
                    "or to bench --concurrency"
                )
            return poisson_trace(jobs.lengths, rate, self.num_jobs, self.seed, jobs.prompts)
        if self.num_jobs > len(jobs.lengths):
            raise WorkloadError(
                f"num_jobs: got {self.num_jobs}; must be at most {len(jobs.lengths)}, "
                f"the jobs that {self.dataset} has within the limits"
            )
        return timestamp_trace(jobs.timestamps_s, jobs.lengths, rate, self.num_jobs)
