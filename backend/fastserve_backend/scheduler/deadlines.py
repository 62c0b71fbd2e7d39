"""When jobs with latency objectives need their next tokens, and which can still have them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from fastserve_backend.job import Job, Place
from fastserve_backend.scheduler.ordered_jobs import OrderedJobs

# The following are in tokens, that is, in times of the job's tpot_slo_s.

# A token is urgent so long before it is due. Less, and a job that leaves the device may not be back
# in time; more, and fewer jobs can wait for others.
_LEAD_TOKENS = 3
# A late job may catch up. It is lost when it is so late.
_GRACE_TOKENS = 10
# A job on the device counts as due so much sooner. Otherwise urgent jobs would take each other's
# memory at every token, and under overload all would be late together.
_STAY_TOKENS = 5
# Tokens are wanted a little early, since the last one decides whether the mean is met.
_TARGET = 0.97

# Each selection changes the standing of so many jobs at most, so that no step waits for thousands.
_CHANGED_AT_ONCE = 16


class Standing(enum.Enum):
    """``AHEAD ⇄ URGENT → LOST``, or ``FREE`` while the next token has no objective."""

    FREE = enum.auto()
    AHEAD = enum.auto()
    """Its next token is not due soon."""
    URGENT = enum.auto()
    """Its next token is due soon."""
    LOST = enum.auto()
    """An objective is missed, or cannot be met any more. The job stays so until it ends."""


@dataclass(slots=True)
class _Timed:
    """A job with an objective."""

    job: Job
    arrived_s: float
    first_token_s: float | None = None
    standing: Standing = Standing.FREE
    urgency: float = 0.0  # sorts urgent jobs, apart from where their KV is


class Deadlines:
    """Knows the standing of each job with an objective.

    A first token is due ``ttft_slo_s`` after the arrival. The k-th later token is due
    ``k · tpot_slo_s`` after the first token came. So a job that has run faster than its objective
    asks for is ahead, and can wait.

    A first token is urgent from the arrival on. It is lost when less time is left than its prefill
    takes alone.

    ``update`` changes a bounded number of jobs. Every operation costs O(log n).

    Args:
        prefill_s: seconds of a prefill of so many tokens.
    """

    def __init__(self, prefill_s: Callable[[int], float]) -> None:
        self._prefill_s = prefill_s
        self._timed: dict[int, _Timed] = {}  # by job number
        # Jobs run after they were put here, so this is the earliest time that they may be urgent.
        self._ahead = OrderedJobs()
        self._prompts = OrderedJobs()  # urgent, by the latest time at which they may begin
        self._decodes = OrderedJobs()  # urgent, by when their tokens are due

    def __len__(self) -> int:
        """Jobs with an objective."""
        return len(self._timed)

    @property
    def num_urgent(self) -> int:
        return len(self._prompts) + len(self._decodes)

    @property
    def num_ahead(self) -> int:
        return len(self._ahead)

    @property
    def token_due_s(self) -> float | None:
        """When the first of the urgent jobs that decode is due. None: there is none."""
        return None if (first := _first(self._decodes)) is None else first[0]

    def prompt_slack(self, now: float) -> float | None:
        """How much of its ``ttft_slo_s`` the prompt that has to begin first can still wait, from 0
        to 1. None: no urgent prompt waits."""
        if (first := _first(self._prompts)) is None:
            return None
        begin_s, job = first
        assert job.service.ttft_slo_s is not None
        return (begin_s - now) / job.service.ttft_slo_s

    def standing(self, job: Job) -> Standing:
        timed = self._timed.get(job.number)
        return Standing.FREE if timed is None else timed.standing

    def urgency(self, job: Job) -> float:
        """Sorts urgent jobs, the most urgent first; in seconds."""
        stay_s = 0.0
        if job.place is Place.DEVICE and job.service.tpot_slo_s is not None:
            stay_s = _STAY_TOKENS * job.service.tpot_slo_s
        return self._timed[job.number].urgency - stay_s

    def add(self, job: Job, now: float) -> None:
        if job.service.ttft_slo_s is not None or job.service.tpot_slo_s is not None:
            timed = self._timed[job.number] = _Timed(job, now)
            self._place(timed, now)

    def remove(self, job: Job) -> None:
        timed = self._timed.pop(job.number, None)
        if timed is not None:
            self._take_out(timed)

    def on_ran(self, job: Job, now: float) -> bool:
        """The job has run. Returns whether its standing or its urgency may have changed."""
        timed = self._timed.get(job.number)
        if timed is None or timed.standing is Standing.LOST:
            return False
        if timed.first_token_s is None and job.num_outputs:
            timed.first_token_s = now
        elif timed.standing is not Standing.URGENT:
            return False  # it only gained time, and ``update`` finds out how much
        self._take_out(timed)
        self._place(timed, now)
        return True

    def update(self, now: float) -> list[Job]:
        """Give jobs the standing that they have now. Returns those whose standing changed."""
        changed: list[Job] = []
        for _ in range(_CHANGED_AT_ONCE):
            if (late := self._first_lost(now)) is not None:
                self._take_out(late)
                late.standing = Standing.LOST
                changed.append(late.job)
            elif (first := _first(self._ahead)) is not None and first[0] <= now:
                timed = self._timed[first[1].number]
                self._take_out(timed)
                self._place(timed, now)
                if timed.standing is not Standing.AHEAD:
                    changed.append(timed.job)
            else:
                break
        return changed

    def _first_lost(self, now: float) -> _Timed | None:
        if (prompt := _first(self._prompts)) is not None and prompt[0] < now:
            return self._timed[prompt[1].number]
        if (decode := _first(self._decodes)) is not None:
            due_s, job = decode
            assert job.service.tpot_slo_s is not None
            if due_s + _GRACE_TOKENS * job.service.tpot_slo_s < now:
                return self._timed[job.number]
        return None

    def _place(self, timed: _Timed, now: float) -> None:
        """Sort a job that is in no order, by its current state."""
        job, ttft_s, tpot_s = timed.job, timed.job.service.ttft_slo_s, timed.job.service.tpot_slo_s
        timed.standing = Standing.FREE
        prefill_s = self._prefill_s(job.num_uncomputed) if job.num_uncomputed > 1 else 0.0
        if timed.first_token_s is None:
            if ttft_s is not None:
                due_s = timed.arrived_s + ttft_s
                timed.standing = Standing.URGENT
                # Of prompts that are due together the shorter is first: one long prompt that is
                # lost makes room for several short ones.
                timed.urgency = due_s + prefill_s
                self._prompts.add(job, due_s - prefill_s)
        elif tpot_s is not None:
            due_s = timed.first_token_s + job.num_outputs * tpot_s * _TARGET - prefill_s
            urgent_s = due_s - _LEAD_TOKENS * tpot_s
            if urgent_s > now:
                timed.standing = Standing.AHEAD
                self._ahead.add(job, urgent_s)
            else:
                timed.standing = Standing.URGENT
                timed.urgency = due_s
                self._decodes.add(job, due_s)

    def _take_out(self, timed: _Timed) -> None:
        for order in (self._ahead, self._prompts, self._decodes):
            if timed.job in order:
                order.remove(timed.job)


def _first(order: OrderedJobs) -> tuple[float, Job] | None:
    """The key of the first job, and the job."""
    first = next(order.items(), None)
    return None if first is None else (first[0][0], first[1])
