"""Skip-join multi-level feedback queue (FastServe §4.1, Algorithm 1).

The output length of a job is unknown. Its input length is known, and fixes the time of its first
iteration. So a job joins the highest queue whose quantum covers its prefill, and skips those above.
A job that sinks skips the queues whose quantum does not cover its next iteration.
"""

from __future__ import annotations

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import time_to_next_token
from fastserve_backend.scheduler.mlfq import MLFQ


class SkipJoinMLFQ(MLFQ):
    """MLFQ whose jobs join, and sink to, queues whose quantum covers their next token.

    A prefill that runs in chunks counts as a whole: what matters is the time to the next token.
    """

    name = "skip_join_mlfq"

    def join_level(self, job: Job) -> int:
        return self._level_for(job, highest=0)

    def demotion_level(self, job: Job) -> int:
        return self._level_for(job, highest=job.queue_level + 1)

    def _level_for(self, job: Job, highest: int) -> int:
        """The highest queue from level ``highest`` down whose quantum covers the next token."""
        needed_s = time_to_next_token(job, self._times)
        for level in range(highest, len(self.quanta_s)):
            if self.quanta_s[level] >= needed_s:
                return level
        return len(self.quanta_s) - 1
