"""Fixed priority by input length: the baseline of FastServe §6.3 that knows only prompts."""

from __future__ import annotations

from fastserve_backend.job import Job
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy


class FixedPriority(KeyedPolicy):
    """Jobs with the shortest prompts run first, however long their outputs are. No job is promoted,
    so long prompts starve under overload."""

    name = "fixed_priority"

    def key(self, job: Job) -> float:
        return len(job.prompt_ids)
