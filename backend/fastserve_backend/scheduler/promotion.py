"""The bound on waiting: starving jobs run before all others, a few at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastserve_backend.config_sections import SchedulerSection
from fastserve_backend.job import Job

# Most of the machine's time that turns may take until their jobs have a token. With more, overload
# would be first come, first served where prompts are most of the work (docs/scheduling.md).
_TIME_SHARE = 0.1
# Share of an iteration's jobs that may have turns at the same time. If all had turns, overload
# would make the queue round-robin. If only one had, starving jobs would wait for one another.
_BATCH_SHARE = 0.25
# starvation_ms: auto, in units of slo_ms. With half as much, jobs with long prompts starve near
# capacity although they would soon run anyway, and their turns delay all others
# (docs/scheduling.md). Ten times as much makes the tail worse (docs/paper_results.md).
_STARVATION_TOKENS = 200


class TurnChanges(NamedTuple):
    """The turns that begin and end before a selection."""

    begun: list[Job]
    """Jobs whose turns begin, those that have starved longest first."""
    over: list[Job]
    """Jobs whose turns are over."""


@dataclass(slots=True)
class _Turn:
    job: Job
    number: int  # ascends
    waited_since_s: float
    ends_s: float
    num_tokens: int  # the job's output tokens when its turn began


class Promotion:
    """Knows since when each job waits, and which jobs have a turn.

    A job starves if it has not run for ``starvation_s``; if it never ran, since its arrival. The
    job that has starved longest gets the next free turn. In its turn it comes before all others: a
    new job until it has its first token, any other job for ``starvation_s``, and until it has a
    token.

    There are ``num_turns`` turns, a quarter of the jobs of the latest iteration. Computing the
    token of a turn may take a tenth of the time until the next turn begins. So none of S starving
    jobs waits longer than::

        (1 + ceil(S / num_turns)) · starvation_s + 11 · (S + num_turns) · token_s

    where ``token_s`` is the longest time in which one job gets its KV back and computes a token.

    A job may have to be swapped in for its turn. That pays only if the job then runs for long; most
    jobs end in their turn. A new job needs only its first token. After that the policy knows as
    much about it as about others.

    FastServe promotes all starving jobs at once, each for a quantum (§4.1, Algorithm 1). If their
    KV exceeds the memory, each of them is swapped in for one token, and the longer the queue, the
    less the server does.

    ``update`` costs O(turns + jobs in flight), every other operation O(1).
    """

    def __init__(self, starvation_s: float, token_s: Callable[[Job], float]) -> None:
        """
        Args:
            token_s: seconds that a job must run to get its next token.
        """
        self.starvation_s = starvation_s
        self._token_s = token_s
        self._next_turn_s = 0.0  # when the next turn may begin
        self.share = 1.0
        """Of the usual turns and of their time, the part that turns may have. The bound holds with
        11 replaced by ``1 + 10 / share``."""
        self.num_turns = 1
        self.num_promotions = 0
        # A job that has run moves to the end, so the first job has waited longest. A job that
        # arrives during an iteration ends up behind the jobs that run in it. So it is found one
        # iteration late.
        self._waiting: OrderedDict[int, tuple[float, Job]] = OrderedDict()
        self._turns: dict[int, _Turn] = {}  # by job number, in order of their beginning

    def start_waiting(self, job: Job, now: float) -> None:
        """The job arrived, or has run."""
        if job.number not in self._turns:
            self._waiting.pop(job.number, None)
            self._waiting[job.number] = (now, job)

    def on_iteration_finished(self, jobs: Sequence[Job], now: float) -> None:
        """These jobs ran in an iteration. They wait from now on."""
        self.num_turns = max(1, int(len(jobs) * _BATCH_SHARE * self.share))
        waiting, turns = self._waiting, self._turns
        for job in jobs:  # hundreds, so this loop calls no ``start_waiting``
            if job.number not in turns:
                waiting[job.number] = (now, job)
                waiting.move_to_end(job.number)

    def remove(self, job: Job) -> None:
        """The job ended, or another policy sorts it from now on."""
        self._waiting.pop(job.number, None)
        self._turns.pop(job.number, None)

    def has_turn(self, job: Job) -> bool:
        return job.number in self._turns

    @property
    def jobs_with_turns(self) -> list[Job]:
        """In the order in which their turns began."""
        return [turn.job for turn in self._turns.values()]

    def turn_number(self, job: Job) -> int:
        """The number of the job's turn. Later turns have higher numbers. The job must have one."""
        return self._turns[job.number].number

    def update(self, now: float, in_flight: Collection[int]) -> TurnChanges:
        """End turns and begin new ones.

        Args:
            in_flight: jobs of unfinished iterations. These do not starve, and keep their turns.
        """
        over = [turn for turn in self._turns.values() if self._is_over(turn, now, in_flight)]
        for turn in over:
            del self._turns[turn.job.number]
            if turn.job.waits_for_mask:  # it could not use its turn, so it still starves
                self._waiting[turn.job.number] = (turn.waited_since_s, turn.job)
                self._waiting.move_to_end(turn.job.number, last=False)
            else:
                self._waiting[turn.job.number] = (now, turn.job)
        return TurnChanges(self._begin_turns(now, in_flight), [turn.job for turn in over])

    def next_promoted(self) -> Job | None:
        """The job that has waited longest among those without a turn."""
        return next((job for _, job in self._waiting.values()), None)

    def turn_due_in_s(self, job: Job, now: float) -> float | None:
        """Seconds until the job's turn, at least 0. None: another job gets the next turn."""
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
        # A turn never ends without a token. When KV memory is short, jobs whose turns end within
        # their prefills could take each other's KV for ever.
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
            time_share = _TIME_SHARE * self.share
            self._next_turn_s = max(now, self._next_turn_s) + self._token_s(job) / time_share
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
