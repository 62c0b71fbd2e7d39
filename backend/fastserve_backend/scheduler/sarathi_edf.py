"""Earliest deadline first: the baseline that meets deadlines up to its capacity.

With prefill in chunks it is Sarathi-EDF, with which QoServe (ASPLOS 2026) compares itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, Scheduled
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy
from fastserve_backend.scheduler.policy_context import PolicyContext

# A first token is due after so many times slo_ms.
_FIRST_TOKEN_SLOS = 10


class SarathiEDF(KeyedPolicy):
    """The job whose next token is due first runs first.

    A job's first token is due by its objective after its arrival, and each further token by its
    objective later. A job without an objective has ``first_token_s`` or ``token_s`` instead. A job
    that misses its deadlines comes first, and stays late. So beyond capacity this policy serves
    jobs that are already late.
    """

    name = "sarathi_edf"

    def __init__(self, limits: BatchLimits, first_token_s: float, token_s: float) -> None:
        super().__init__(limits)
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._arrived_s: dict[int, float] = {}

    @classmethod
    def from_config(cls, context: PolicyContext) -> Self:
        slo_s = context.config.slo_ms / 1e3
        return cls(context.limits, first_token_s=_FIRST_TOKEN_SLOS * slo_s, token_s=slo_s)

    def key(self, job: Job) -> float:
        ttft_s, tpot_s = job.service.ttft_slo_s, job.service.tpot_slo_s
        first_token_s = self._first_token_s if ttft_s is None else ttft_s
        token_s = self._token_s if tpot_s is None else tpot_s
        return self._arrived_s[job.number] + first_token_s + job.num_outputs * token_s

    def add(self, job: Job, now: float) -> None:
        self._arrived_s[job.number] = now
        super().add(job, now)

    def remove(self, job: Job) -> None:
        super().remove(job)
        del self._arrived_s[job.number]

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        for job, _ in ran:
            self._jobs.move(job, self.key(job))
