"""Skip-join multi-level feedback queue (FastServe §4.1, Algorithm 1).

The output length of a job is unknown, but its input length is known and fixes the time of its first
iteration. A job therefore joins the highest queue whose quantum covers its prefill, skipping those
above, and is demoted past queues whose quantum its next iteration would not fit.
"""

from __future__ import annotations

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import time_to_next_token
from fastserve_backend.scheduler.mlfq import MLFQ


class SkipJoinMLFQ(MLFQ):
    """MLFQ whose jobs join, and sink to, queues that their next token fits.

    A prefill that runs in chunks counts whole: the queue is that of the time to the job's token.
    """

    name = "skip_join_mlfq"

    def join_level(self, job: Job) -> int:
        return self._level_for(job, highest=0)

    def demotion_level(self, job: Job) -> int:
        return self._level_for(job, highest=job.queue_level + 1)

    def _level_for(self, job: Job, highest: int) -> int:
        """The highest queue, from ``highest`` down, whose quantum covers the job's next token."""
        needed_s = time_to_next_token(job, self._times)
        for level in range(highest, len(self.quanta_s)):
            if self.quanta_s[level] >= needed_s:
                return level
        return len(self.quanta_s) - 1
