"""Traces: jobs with their arrivals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastserve_client.errors import WorkloadError

from fastserve_bench.workload.arrivals import arrival_times
from fastserve_bench.workload.lengths import Lengths
from fastserve_bench.workload.service_class import NO_CLASS, ServiceClass


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace. A trace is a list of them, sorted by arrival."""

    arrival_s: float
    """Seconds since the trace began."""
    prompt_tokens: int
    output_tokens: int
    """Exact number of tokens to generate: the load test forces this length (FastServe §6.1)."""
    prompt: str | None = None
    """The prompt's text, if the data set has texts."""
    service: ServiceClass = NO_CLASS


def poisson_trace(
    lengths: Lengths,
    rate: float,
    num_jobs: int,
    seed: int,
    prompts: Sequence[str] | None = None,
    *,
    classes: Sequence[str] | None = None,
    in_bursts: bool = False,
) -> list[TraceJob]:
    """Draws jobs from ``lengths`` with replacement. They arrive as a Poisson process, or in bursts.

    One seed gives the same jobs at every rate, and arrivals only scale with the rate. So the points
    of a sweep differ in nothing else. A longer trace begins with the shorter one.

    Args:
        rate: Jobs per second, > 0.
        seed: At least 0.
        prompts: The text of each prompt, in the order of ``lengths``.
        classes: The name of each job's class, in the same order. An empty name is no class.

    Raises:
        WorkloadError: no lengths, or a number out of its range.
    """
    _check_rate(rate)
    _check_num_jobs(num_jobs)
    if seed < 0:
        raise WorkloadError(f"seed: got {seed}; must be at least 0")
    if not lengths:
        raise WorkloadError("lengths: got none; a trace needs at least one job length")
    # A generator for each, so that the number of gaps does not change the jobs.
    gap_rng, job_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    gaps = gap_rng.standard_exponential(num_jobs)
    arrivals_s = arrival_times(gaps, rate, in_bursts=in_bursts)
    drawn = job_rng.integers(len(lengths), size=num_jobs)
    texts = [None] * len(lengths) if prompts is None else prompts
    services = _services(classes, len(lengths))
    return [
        TraceJob(arrival_s, lengths[index][0], lengths[index][1], texts[index], services[index])
        for arrival_s, index in zip(arrivals_s, drawn.tolist(), strict=True)
    ]


def timestamp_trace(
    timestamps_s: Sequence[float],
    lengths: Lengths,
    rate: float | None,
    num_jobs: int,
    classes: Sequence[str] | None = None,
) -> list[TraceJob]:
    """Jobs with recorded gaps between arrivals. The first arrives at 0.

    Args:
        timestamps_s: One for each job, in seconds of any clock and in any order.
        lengths: At least one.
        rate: Scales all gaps so that their mean is ``1 / rate`` seconds. ``None``: no scaling.
        num_jobs: Takes so many jobs, the earliest ones.
        classes: See :func:`poisson_trace`.

    Raises:
        WorkloadError: a number out of its range, or a rate for timestamps without a mean gap.
    """
    _check_num_jobs(num_jobs)
    order = sorted(range(len(lengths)), key=timestamps_s.__getitem__)[:num_jobs]
    first_s, last_s = timestamps_s[order[0]], timestamps_s[order[-1]]
    scale = 1.0
    if rate is not None:
        _check_rate(rate)
        if first_s == last_s:
            raise WorkloadError(
                f"rate: got {rate:g} for jobs that all arrive at once; "
                "needs two timestamps that differ"
            )
        scale = (len(order) - 1) / (last_s - first_s) / rate
    services = _services(classes, len(lengths))
    return [
        TraceJob((timestamps_s[i] - first_s) * scale, *lengths[i], service=services[i])
        for i in order
    ]


def merged(*traces: Sequence[TraceJob]) -> list[TraceJob]:
    """All jobs of these traces, in order of arrival."""
    return sorted((job for trace in traces for job in trace), key=lambda job: job.arrival_s)


def mean_rate(trace: Sequence[TraceJob]) -> float:
    """Jobs per second. Needs at least one job; 0 if all arrive at once."""
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    return (len(trace) - 1) / span_s if span_s > 0 else 0.0


def check_trace_fits(
    trace: Sequence[TraceJob], max_tokens: int, limited_by: str = "max_model_len"
) -> None:
    """Refuses a trace with a job of more than ``max_tokens``, the limit of ``limited_by``.

    Raises:
        WorkloadError: a job is too long. The message names it, its lengths and the limit.
    """
    for number, job in enumerate(trace, start=1):
        if job.prompt_tokens + job.output_tokens > max_tokens:
            raise WorkloadError(
                f"trace: got job {number} with {job.prompt_tokens} prompt + {job.output_tokens} "
                f"output tokens; must be at most {max_tokens} together ({limited_by})"
            )


def _services(classes: Sequence[str] | None, num_jobs: int) -> Sequence[ServiceClass]:
    if classes is None:
        return [NO_CLASS] * num_jobs
    by_name = {name: ServiceClass(name) for name in set(classes)}
    return [by_name[name] for name in classes]


def _check_num_jobs(num_jobs: int) -> None:
    if num_jobs < 1:
        raise WorkloadError(f"num_jobs: got {num_jobs}; must be at least 1")


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(f"rate: got {rate:g}; must be a finite number of jobs/s above 0")
