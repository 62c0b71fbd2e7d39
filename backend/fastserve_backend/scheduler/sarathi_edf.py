"""Earliest deadline first: the baseline that meets deadlines up to its capacity.

With prefill in chunks it is Sarathi-EDF, with which QoServe (ASPLOS 2026) compares itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, Scheduled
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy


class SarathiEDF(KeyedPolicy):
    """The job whose next token is due first runs first.

    A job's first token is due ``first_token_s`` after its arrival, and each further token
    ``token_s`` later. A job that misses its deadlines comes first, and stays late. So beyond
    capacity this policy serves jobs that are already late.
    """

    name = "sarathi_edf"

    def __init__(self, limits: BatchLimits, first_token_s: float, token_s: float) -> None:
        super().__init__(limits)
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._arrived_s: dict[int, float] = {}

    def key(self, job: Job) -> float:
        due_s = self._first_token_s + job.num_outputs * self._token_s
        return self._arrived_s[job.number] + due_s

    def add(self, job: Job, now: float) -> None:
        self._arrived_s[job.number] = now
        super().add(job, now)

    def remove(self, job: Job) -> None:
        super().remove(job)
        del self._arrived_s[job.number]

    def iteration_done(self, ran: Sequence[Scheduled], now: float) -> None:
        for job, _ in ran:
            self._jobs.move(job, self.key(job))
