"""Shortest remaining processing time: an oracle that no policy without knowledge beats by much.

It takes ``max_tokens`` for the output length. That is true where lengths are forced
(``ignore_eos``), as in benchmarks. Real requests are sorted by the most that they may get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Scheduled,
    time_to_next_token,
)
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy
from fastserve_backend.scheduler.policy_context import PolicyContext


class SRPT(KeyedPolicy):
    """The key is the remaining time. It is computed again when the job has run or the iteration
    times have drifted."""

    name = "srpt"

    def __init__(self, limits: BatchLimits, times: IterationTimes) -> None:
        super().__init__(limits)
        self._times = times

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        return cls(context.limits, context.times)

    def key(self, job: Job) -> float:
        tokens_after_next = job.params.max_tokens - job.num_outputs - 1
        return time_to_next_token(job, self._times) + tokens_after_next * self._times.decode_s(
            job.num_tokens
        )

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        for job, _ in ran:
            self._jobs.move(job, self.key(job))

    def recalibrate(self) -> None:
        self._jobs.reorder(self.key)
