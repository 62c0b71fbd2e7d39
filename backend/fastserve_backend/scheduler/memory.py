"""What ``fill_batch`` asks of the memory: each job is offered, and the answer is a value."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from fastserve_backend.job import Job, Place


class Outcome(enum.Enum):
    """What became of a job that was offered."""

    TAKEN = enum.auto()
    """It has memory for its tokens, and runs."""
    NO_ROOM = enum.auto()
    """Others need the memory more. It is passed over."""
    WAITS_FOR_COPIES = enum.auto()
    """Its KV, or blocks for it, are on their way. It is passed over."""
    WAITS_FOR_PREFIX = enum.auto()
    """Others are about to compute what it begins with. It keeps its tokens of the iteration."""


class Answer(NamedTuple):
    """What became of a job that was offered, and who need not be offered any more."""

    outcome: Outcome
    closed: frozenset[Place] = frozenset()
    """No job whose KV is at one of these places is taken in the rest of the round."""


EVERYWHERE = frozenset(Place)
"""``Answer.closed`` when no other job is taken in the round."""
TAKEN = Answer(Outcome.TAKEN)
"""The only answer with this outcome: a constant is found faster than a member of an enum."""


class Memory(Protocol):
    """What a batch needs beside its limits: KV blocks (``kv_cache.round.Round``).

    The jobs are offered in order of priority.
    """

    def find_prefix(self, job: Job) -> None:
        """Update ``job.num_uncomputed``: the job need not compute what others have computed of its
        first tokens. Called before the job's tokens of the iteration are counted."""
        ...

    def offer(self, job: Job, num_tokens: int) -> Answer:
        """Give the job memory for its next ``num_tokens`` tokens, if there is any for it."""
        ...


class Unlimited:
    """Memory for everyone."""

    def find_prefix(self, job: Job) -> None:
        pass

    def offer(self, job: Job, num_tokens: int) -> Answer:
        return TAKEN


UNLIMITED = Unlimited()
