"""Fixed priority by input length: the baseline of FastServe §6.3 that knows only prompts."""

from __future__ import annotations

from fastserve_backend.job import Job
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy


class FixedPriority(KeyedPolicy):
    """The shortest prompts run first, whatever their outputs turn out to be. Nothing promotes a
    job: under overload long prompts starve."""

    name = "fixed_priority"

    def key(self, job: Job) -> float:
        return len(job.prompt_ids)
