"""First come, first served, run to completion with iteration-level batching (ORCA's policy)."""

from __future__ import annotations

from fastserve_backend.job import Job
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy


class FCFS(KeyedPolicy):
    """A running job is never preempted for a later one."""

    name = "fcfs"

    def key(self, job: Job) -> float:
        return job.number
