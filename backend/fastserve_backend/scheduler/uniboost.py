"""UniBoost: arrival order with a head start for short jobs (arXiv 2606.18431, ICML 2026).

No length is predicted. The paper gives each job a boost with one parameter γ: near 0 the shortest
job runs first, and with a large γ the first to arrive. The formula is that of the γ-Boost policy
(Yu and Scully, Strongly tail-optimal scheduling in the light-tailed M/G/1, 2024)::

    b(s) = ln(1 / (1 − e^(−γ·s))) / γ

The size s is the known part of it: the time of the prefill and of the tokens so far. This baseline
leaves out two parts of the paper: the choice of γ by the load, and preemption by cached prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, IterationTimes, Scheduled
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy
from fastserve_backend.scheduler.policy_context import PolicyContext

# γ, per second. A job of a second gets a head start of a minute, and a job of a minute one of
# a second.
_GAMMA = 0.05
_LEAST_S = 1e-3  # the size of every shorter job


class UniBoost(KeyedPolicy):
    """The job with the earliest boosted arrival runs first."""

    name = "uniboost"

    def __init__(self, limits: BatchLimits, times: IterationTimes) -> None:
        super().__init__(limits)
        self._times = times
        self._arrived_s: dict[int, float] = {}

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        return cls(context.limits, context.times)

    def key(self, job: Job) -> float:
        prefill_s = self._times.prefill_s(len(job.prompt_ids))
        size_s = prefill_s + job.num_outputs * self._times.decode_s(job.num_tokens)
        boost_s = -math.log(-math.expm1(-_GAMMA * max(size_s, _LEAST_S))) / _GAMMA
        return self._arrived_s[job.number] - boost_s

    def add(self, job: Job, now: float) -> None:
        self._arrived_s[job.number] = now
        super().add(job, now)

    def remove(self, job: Job) -> None:
        super().remove(job)
        del self._arrived_s[job.number]

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        for job, _ in ran:
            self._jobs.move(job, self.key(job))
