"""A workload as a user asks for it: a data set, the number of jobs, and changes to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from fastserve_client.errors import WorkloadError

from fastserve_bench.workload.arrivals import Arrivals
from fastserve_bench.workload.datasets import Jobs, load_jobs
from fastserve_bench.workload.lengths import NO_LIMITS, LengthLimits, scale_ratio
from fastserve_bench.workload.mixes import MIXES, mixed_trace
from fastserve_bench.workload.trace import TraceJob, poisson_trace, timestamp_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of ``simulate`` and ``bench``, at any rate."""

    dataset: str
    """See :func:`load_lengths`."""
    num_jobs: int
    seed: int = 0
    limits: LengthLimits = NO_LIMITS
    scale: float = 1.0
    """Multiplies all lengths, before the limits."""
    length_ratio: float | None = None
    """Mean prompt over mean output: see :func:`scale_ratio`."""
    arrivals: str | None = None
    """One of ``Arrivals``. ``None``: a trace's own gaps if it has some, else Poisson."""

    def trace(self, rate: float | None) -> list[TraceJob]:
        """The trace at ``rate`` jobs per second; ``None``: at the data set's own timestamps.

        With timestamps it has the data set's first jobs, and nothing is random, unless other
        arrivals are asked for. Without timestamps, or with another ratio of lengths, jobs arrive
        as a Poisson process or in bursts (see :func:`poisson_trace`).

        Raises:
            WorkloadError: the data set or a number cannot be used.
        """
        if self.arrivals is not None and self.arrivals not in get_args(Arrivals):
            raise WorkloadError(
                f"arrivals: got {self.arrivals!r}; must be one of {', '.join(get_args(Arrivals))}"
            )
        if self.length_ratio is not None and rate is None:
            raise WorkloadError("rates: got none; --length-ratio needs a rate")
        if self.dataset in MIXES:
            return self._mix(rate)
        jobs = load_jobs(self.dataset, self.limits, self.scale)
        if self.length_ratio is not None:
            # The texts and timestamps do not belong to these changed lengths.
            jobs = Jobs(scale_ratio(jobs.lengths, self.length_ratio, self.limits))
        if jobs.timestamps_s is None and self.arrivals == "trace":
            raise WorkloadError(
                f"arrivals: got 'trace'; {self.dataset} has no timestamps of its own, take poisson "
                "or bursts"
            )
        if jobs.timestamps_s is None or self.arrivals in ("poisson", "bursts"):
            in_bursts = self.arrivals == "bursts"
            return poisson_trace(
                jobs.lengths,
                self._given(rate),
                self.num_jobs,
                self.seed,
                jobs.prompts,
                in_bursts=in_bursts,
            )
        if self.num_jobs > len(jobs.lengths):
            raise WorkloadError(
                f"num_jobs: got {self.num_jobs}; must be at most {len(jobs.lengths)}, "
                f"the jobs that {self.dataset} has within the limits"
            )
        return timestamp_trace(jobs.timestamps_s, jobs.lengths, rate, self.num_jobs)

    def _mix(self, rate: float | None) -> list[TraceJob]:
        changed = [
            name
            for name, is_changed in (
                ("scale", self.scale != 1.0),
                ("length_ratio", self.length_ratio is not None),
                ("arrivals trace", self.arrivals == "trace"),
            )
            if is_changed
        ]
        if changed:
            raise WorkloadError(
                f"{changed[0]}: does not go with the data set {self.dataset}; leave it out"
            )
        in_bursts = self.arrivals == "bursts"
        trace = mixed_trace(
            self.dataset, self._given(rate), self.num_jobs, self.seed, in_bursts=in_bursts
        )
        return [job for job in trace if self.limits.allow(job.prompt_tokens, job.output_tokens)]

    def _given(self, rate: float | None) -> float:
        if rate is None:
            without = "timestamps of its own" if self.arrivals is None else f"{self.arrivals} rate"
            raise WorkloadError(
                f"rate: got none; {self.dataset} has no {without}, give --rates, or to bench "
                "--concurrency"
            )
        return rate
