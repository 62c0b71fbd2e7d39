"""A workload as a user asks for it: a data set, the number of jobs, and changes to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from fastserve_client.errors import WorkloadError

from fastserve_bench.workload.arrivals import Arrivals
from fastserve_bench.workload.datasets import Jobs, load_jobs
from fastserve_bench.workload.lengths import NO_LIMITS, LengthLimits, scale_ratio
from fastserve_bench.workload.mixes import MIXES, mixed_trace
from fastserve_bench.workload.service_class import NO_CLASS, ServiceClass
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
    classes: tuple[ServiceClass, ...] = ()
    """If the data set names its jobs' classes, these say what they ask for. If not, each job has
    one at random, by their shares."""

    def trace(self, rate: float | None) -> list[TraceJob]:
        """The trace at ``rate`` jobs per second; ``None``: at the data set's own timestamps.

        With timestamps it has the data set's first jobs, and nothing is random, unless other
        arrivals are asked for. Without timestamps, or with another ratio of lengths, jobs arrive
        as a Poisson process or in bursts (see :func:`poisson_trace`).

        Raises:
            WorkloadError: the data set, a number or a class cannot be used.
        """
        trace = self._without_classes(rate)
        return self._classed(trace) if self.classes else trace

    def _without_classes(self, rate: float | None) -> list[TraceJob]:
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
            lengths = scale_ratio(jobs.lengths, self.length_ratio, self.limits)
            jobs = Jobs(lengths, classes=jobs.classes)
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
                classes=jobs.classes,
                in_bursts=in_bursts,
            )
        if self.num_jobs > len(jobs.lengths):
            raise WorkloadError(
                f"num_jobs: got {self.num_jobs}; must be at most {len(jobs.lengths)}, "
                f"the jobs that {self.dataset} has within the limits"
            )
        return timestamp_trace(jobs.timestamps_s, jobs.lengths, rate, self.num_jobs, jobs.classes)

    def _classed(self, trace: Sequence[TraceJob]) -> list[TraceJob]:
        by_name = {one.name: one for one in self.classes}
        if len(by_name) < len(self.classes):
            raise WorkloadError(
                f"class: got {', '.join(one.name for one in self.classes)}; each must have another "
                "name"
            )
        named = {job.service.name for job in trace} - {NO_CLASS.name}
        if unknown := sorted(named - by_name.keys()):
            raise WorkloadError(
                f"class: {self.dataset} has jobs of the class {unknown[0]!r}; say what it asks "
                f"for, at least --class {unknown[0]}"
            )
        shares = [one.share for one in self.classes]
        if named:
            if any(share is not None for share in shares):
                raise WorkloadError(
                    f"class: got a share; {self.dataset} says which jobs have which class, so "
                    "leave it out"
                )
            return [replace(job, service=by_name.get(job.service.name, NO_CLASS)) for job in trace]
        if any(share is None for share in shares):
            raise WorkloadError(
                f"class: got none of the shares or not all; {self.dataset} does not say which jobs "
                "have which class, so write NAME:SHARE"
            )
        # The generators of arrivals and lengths are others, so classes change neither.
        rng = np.random.default_rng(np.random.SeedSequence(self.seed).spawn(3)[2])
        weights = np.array(shares, dtype=np.float64)
        drawn = rng.choice(len(shares), len(trace), p=weights / weights.sum())
        return [
            replace(job, service=self.classes[index])
            for job, index in zip(trace, drawn.tolist(), strict=True)
        ]

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
