"""First come, first served, run to completion with iteration-level batching (ORCA's policy)."""

from __future__ import annotations

from fastserve_backend.job import Job
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy


class FCFS(KeyedPolicy):
    """No job is preempted for a job that arrived later."""

    name = "fcfs"

    def key(self, job: Job) -> float:
        return job.number
