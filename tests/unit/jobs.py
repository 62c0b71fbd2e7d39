"""Jobs for tests of decisions: only their sizes matter."""

from __future__ import annotations

from array import array

from fastserve_backend.job import Job
from fastserve_backend.sampling_params import SamplingParams


def make_job(number: int, prompt_len: int, *, computed: bool = False) -> Job:
    """A job with a prompt of this many tokens; ``computed``: it is in the decode phase."""
    job = Job(
        id=f"job-{number}",
        number=number,
        prompt_ids=array("i", range(prompt_len)),
        params=SamplingParams(max_tokens=1000),
        arrival_s=0.0,
    )
    if computed:
        run_iteration(job)
    return job


def run_iteration(job: Job) -> None:
    """What an iteration does to a job: all its tokens are in the cache, and there is a new one."""
    job.num_computed = job.num_tokens
    job.output_ids.append(7)
