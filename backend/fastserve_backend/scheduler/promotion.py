"""Starving jobs run before all others, a few at a time: the bound on waiting."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastserve_backend.config import SchedulerSection
from fastserve_backend.job import Job

# Time of the machine that turns may take until their jobs have a token. More would make overload
# first come, first served where prompts are most of the work (docs/scheduling.md).
_TIME_SHARE = 0.1
# Jobs that have a turn at once, of those of an iteration. If all had, overload would make the queue
# round-robin; if one had, the wait of the last starving job would grow with their number.
_BATCH_SHARE = 0.25
# starvation_ms: auto, in units of slo_ms. Half as much makes jobs with long prompts starve near
# capacity, where they would soon have run anyhow, and their turns delay all others
# (docs/scheduling.md). Ten times as much costs the tail (docs/paper_results.md).
_STARVATION_TOKENS = 200


class TurnChanges(NamedTuple):
    """What a selection changes."""

    begun: list[Job]
    """In the order in which they starved."""
    over: list[Job]


@dataclass(slots=True)
class _Turn:
    job: Job
    number: int  # ascends
    waited_since_s: float
    ends_s: float
    num_tokens: int  # outputs of the job when its turn began


class Promotion:
    """Knows since when each job waits, and which jobs have a turn.

    A job that has not run for ``starvation_s`` (since its arrival, if it never ran) starves. The
    job that has starved longest gets the next free turn: it comes before all others until it has a
    token, and if it had one before, for ``starvation_s``. There are ``num_turns`` turns, a quarter
    of the jobs of the latest iteration. A turn begins when a tenth of the time since the turn
    before it is enough for that one's token. So of S starving jobs none waits longer than::

        (1 + ceil(S / num_turns)) · starvation_s + 11 · (S + num_turns) · token_s

    A turn that cost a job's way back to the device is worth it only if the job then runs for long:
    most end in it. New jobs need no more than their first token, after which the policy knows as
    much of them as of others.

    ``token_s`` is the longest time in which one job gets its KV back and computes a token.

    FastServe promotes all starving jobs at once, each for a quantum (§4.1, Algorithm 1). Where
    their KV exceeds the memory, each of them is swapped in for one token, and the server does less
    the longer the queue is.

    Every operation costs O(1), ``update`` O(turns + jobs in flight).
    """

    def __init__(self, starvation_s: float, token_s: Callable[[Job], float]) -> None:
        """
        Args:
            token_s: seconds that a job has to run before it has its next token.
        """
        self.starvation_s = starvation_s
        self._token_s = token_s
        self._next_turn_s = 0.0  # no turn begins before
        self.num_turns = 1
        self.num_promotions = 0
        # A job is appended again when it ran, so the first has waited longest. A job that arrives
        # during an iteration stands behind those that ran in it: it is found that iteration late.
        self._waiting: OrderedDict[int, tuple[float, Job]] = OrderedDict()
        self._turns: dict[int, _Turn] = {}  # by job number, in order of their beginning

    def start_waiting(self, job: Job, now: float) -> None:
        """The job arrived, or has run."""
        if job.number not in self._turns:
            self._waiting.pop(job.number, None)
            self._waiting[job.number] = (now, job)

    def iteration_done(self, jobs: Sequence[Job], now: float) -> None:
        """They ran in it, and wait from now on."""
        self.num_turns = max(1, int(len(jobs) * _BATCH_SHARE))
        waiting, turns = self._waiting, self._turns
        for job in jobs:  # hundreds, so without a call for each
            if job.number not in turns:
                waiting[job.number] = (now, job)
                waiting.move_to_end(job.number)

    def remove(self, job: Job) -> None:
        """The job ended, or another policy orders it from now on."""
        self._waiting.pop(job.number, None)
        self._turns.pop(job.number, None)

    def has_turn(self, job: Job) -> bool:
        return job.number in self._turns

    def turn_number(self, job: Job) -> int:
        """Ascends in the order in which turns began; the job has one."""
        return self._turns[job.number].number

    def jobs_with_turns(self) -> Iterable[Job]:
        """The first to have begun its turn comes first."""
        return (turn.job for turn in self._turns.values())

    def update(self, now: float, in_flight: Collection[int]) -> TurnChanges:
        """End turns and begin others.

        Args:
            in_flight: jobs of unfinished iterations. They do not starve, and keep their turns.
        """
        over = [turn for turn in self._turns.values() if self._is_over(turn, now, in_flight)]
        for turn in over:
            del self._turns[turn.job.number]
            if turn.job.waits_for_mask:  # it could not use its turn, and starves still
                self._waiting[turn.job.number] = (turn.waited_since_s, turn.job)
                self._waiting.move_to_end(turn.job.number, last=False)
            else:
                self._waiting[turn.job.number] = (now, turn.job)
        return TurnChanges(self._begin_turns(now, in_flight), [turn.job for turn in over])

    def next_promoted(self) -> Job | None:
        """The job that has waited longest, and has no turn."""
        return next((job for _, job in self._waiting.values()), None)

    def turn_in(self, job: Job, now: float) -> float | None:
        """Seconds until the job's turn, at least 0. None: another job has the next turn."""
        first = next(iter(self._waiting), None)
        if job.number != first:
            return None
        starves_s = max(self._next_turn_s, self._waiting[first][0] + self.starvation_s)
        if len(self._turns) >= self.num_turns:
            starves_s = max(starves_s, min(turn.ends_s for turn in self._turns.values()))
        return max(0.0, starves_s - now)

    def _is_over(self, turn: _Turn, now: float, in_flight: Collection[int]) -> bool:
        job = turn.job
        if job.waits_for_mask:
            return True
        # Never without a token: when KV memory is short, jobs whose turns end within their prefills
        # could take each other's KV for ever.
        has_token = job.num_outputs > turn.num_tokens
        return now >= turn.ends_s and has_token and job.number not in in_flight

    def _begin_turns(self, now: float, in_flight: Collection[int]) -> list[Job]:
        begun: list[Job] = []
        num_free = self.num_turns - len(self._turns)
        for number, (since_s, job) in self._waiting.items():
            is_late = now - since_s >= self.starvation_s
            if len(begun) >= num_free or now < self._next_turn_s or not is_late:
                break
            if number in in_flight:
                continue
            self.num_promotions += 1
            self._next_turn_s = max(now, self._next_turn_s) + self._token_s(job) / _TIME_SHARE
            ends_s = now + (self.starvation_s if job.num_outputs else 0.0)
            self._turns[number] = _Turn(job, self.num_promotions, since_s, ends_s, job.num_outputs)
            begun.append(job)
        for job in begun:
            del self._waiting[job.number]
        return begun


def configured_starvation_s(config: SchedulerSection) -> float:
    """The wait in seconds after which a job starves, as ``starvation_ms`` sets it."""
    starvation_ms = config.starvation_ms
    if starvation_ms == "auto":
        starvation_ms = config.slo_ms * _STARVATION_TOKENS
    return starvation_ms / 1e3
