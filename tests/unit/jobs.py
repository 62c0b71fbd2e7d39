"""Jobs for tests of scheduling decisions, for which only sizes matter."""

from __future__ import annotations

from array import array

from fastserve_backend.job import Job, Place, ServiceLevel
from fastserve_backend.sampling_params import SamplingParams


def make_job(
    number: int,
    prompt_len: int,
    *,
    max_tokens: int = 1000,
    arrival_s: float = 0.0,
    ignore_eos: bool = False,
    predicted_tokens: int | None = None,
    computed: bool = False,
    priority: int = 0,
) -> Job:
    """A job with a prompt of this many tokens; ``computed``: it is in the decode phase."""
    job = Job(
        id=f"job-{number}",
        number=number,
        prompt_ids=array("i", range(prompt_len)),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        arrival_s=arrival_s,
        service=ServiceLevel(priority=priority),
        predicted_tokens=predicted_tokens,
    )
    if computed:
        run_iteration(job)
    return job


def run_iteration(job: Job, num_tokens: int | None = None) -> None:
    """Applies an iteration to a job: ``num_tokens`` more are in the cache, by default all that are
    left. If none is left, the job gets a new token."""
    num_tokens = job.num_uncomputed if num_tokens is None else num_tokens
    job.num_computed, job.num_shared = job.num_ready + num_tokens, 0
    job.place = Place.DEVICE
    if job.num_uncomputed == 0:
        job.output_ids.append(7)
