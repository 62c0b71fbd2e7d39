"""What ``fill_batch`` asks of the memory: each job is offered, and the answer is a value."""

from __future__ import annotations

from typing import Protocol

from fastserve_backend.job import Job
from fastserve_backend.offers import OfferAnswer


class Memory(Protocol):
    """What a batch needs beside its limits: KV blocks (``kv_cache.round.Round``).

    The jobs are offered in order of priority.
    """

    def find_prefix(self, job: Job) -> None:
        """Update ``job.num_uncomputed``: the job need not compute what others have computed of its
        first tokens. Called before the job's tokens of the iteration are counted."""
        ...

    def offer(self, job: Job, num_tokens: int) -> OfferAnswer:
        """Give the job memory for its next ``num_tokens`` tokens, if there is any for it."""
        ...
