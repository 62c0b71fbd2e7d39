"""One round of giving out KV blocks: a scheduling turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from fastserve_backend.job import Job, Place

Urgency = Callable[[Job], tuple[float, float]]
"""A key by which jobs sort by when they will run next, the soonest first."""


class RunningOrder(Protocol):
    """What is asked of the scheduling policy."""

    def urgency(self, now: float) -> Urgency: ...

    def by_urgency(self, place: Place, urgency: Urgency, *, last_first: bool) -> Iterator[Job]:
        """Jobs whose KV was there when the round began, those first that run next, or last, by
        what ``urgency`` returned."""
        ...

    def placed(self, job: Job) -> None:
        """The job's ``place`` has changed."""
        ...

    def has_turn(self, job: Job) -> bool: ...


@dataclass(slots=True)
class Round:
    """What it begins with, and what has become of the jobs so far. Only the KV manager changes it,
    all others read."""

    now: float
    order: RunningOrder
    busy: set[int] = field(default_factory=set)
    """Jobs in flight or taken."""
    running: set[int] = field(default_factory=set)
    """In flight, and may be offered for the step after."""
    is_ahead: bool = False
    """Of the end of a step."""
    num_settled: int = 0
    """Holders that the policy will not offer any more."""
    offered: set[int] = field(default_factory=set)
    taken: list[Job] = field(default_factory=list)
    stalled: list[Job] = field(default_factory=list)
    """Would run, but for a copy."""
    is_waiting: bool = False
    """The job offered last, for what others are about to compute."""
    refuses_new: bool = False
    _urgency: Urgency | None = None

    def by_urgency(self, place: Place, *, last_first: bool = False) -> Iterator[Job]:
        return self.order.by_urgency(place, self.urgency(), last_first=last_first)

    def urgency(self) -> Urgency:
        if self._urgency is None:
            self._urgency = self.order.urgency(self.now)
        return self._urgency
