"""What scheduler and KV cache say to each other: estimates of when jobs run, and answers to offers.

The two import this file, and never each other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from fastserve_backend.job import Job, Place

NextRunEstimate = Callable[[Job], tuple[float, ...]]
"""A sort key of a job: a job with a smaller key is estimated to run sooner."""


class OfferOutcome(enum.Enum):
    """What became of a job that was offered."""

    TAKEN = enum.auto()
    """It has memory for its tokens, and runs."""
    NO_ROOM = enum.auto()
    """Others need the memory more. It is passed over."""
    WAITS_FOR_COPIES = enum.auto()
    """Its KV, or blocks for it, are on their way. It is passed over."""
    WAITS_FOR_PREFIX = enum.auto()
    """Others are about to compute what it begins with. It keeps its tokens of the iteration."""


class OfferAnswer(NamedTuple):
    """What became of a job that was offered, and who need not be offered any more."""

    outcome: OfferOutcome
    closed: frozenset[Place] = frozenset()
    """No job whose KV is at one of these places is taken in the rest of the round."""


EVERYWHERE = frozenset(Place)
"""``OfferAnswer.closed`` when no other job is taken in the round."""
TAKEN = OfferAnswer(OfferOutcome.TAKEN)
"""The only answer with this outcome: a constant is found faster than a member of an enum."""
