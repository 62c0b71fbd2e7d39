"""One round: the policy's jobs are offered, and each gets KV blocks, waits, or is passed over."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastserve_backend.config import SwapStrategy
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.holders import Holders
from fastserve_backend.kv_cache.look_ahead import LookAhead
from fastserve_backend.kv_cache.prefixes import PrefixCopies, Prefixes
from fastserve_backend.kv_cache.round_state import RoundState, RunningOrder
from fastserve_backend.kv_cache.swapping import Swapping
from fastserve_backend.kv_cache.tiers import Transfer, TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.scheduler.memory import EVERYWHERE, TAKEN, Answer, Outcome

# Where no job can be swapped, a new job starts only if each job on the device can still grow by so
# many blocks. Otherwise those would soon take each other's KV and compute it again.
_GROWTH_BLOCKS = 4


# What is closed, as a sum: the index of ``_answers``. Nothing is 0.
_NEW, _HOST, _ALL = 1, 2, 4


def _answers(outcome: Outcome) -> tuple[Answer, ...]:
    """The answers of one outcome, by what is closed. They are made once, since a round may pass
    over thousands of jobs."""
    new, host = Place.NOWHERE, Place.HOST
    some = (frozenset[Place](), frozenset({new}), frozenset({host}), frozenset({new, host}))
    return tuple(Answer(outcome, closed) for closed in (*some, EVERYWHERE))


_NO_ROOM = _answers(Outcome.NO_ROOM)
_WAITS_FOR_COPIES = _answers(Outcome.WAITS_FOR_COPIES)
_WAITS_FOR_PREFIX = _answers(Outcome.WAITS_FOR_PREFIX)


class StepVerdict(enum.Enum):
    """Whether the step of the jobs taken in a round may be sent."""

    SEND = enum.auto()
    HOLD = enum.auto()
    """Not before all transfers have ended."""
    TOO_EARLY = enum.auto()
    """Not before the running step has ended. A job in it would have to leave for a more urgent job,
    or a more urgent job waits for blocks that are free when it ends."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round sends."""

    verdict: StepVerdict
    transfers: Sequence[Transfer]
    """To start now, in this order, whatever the verdict."""
    prefix_copies: PrefixCopies
    """To make with the step, before it runs."""


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The parts of the KV cache with which a round works."""

    strategy: SwapStrategy
    tiers: TwoTierKV
    prefixes: Prefixes
    holders: Holders
    swapping: Swapping
    look_ahead: LookAhead
    costs: SwapCosts
    counters: EngineCounters
    order: RunningOrder


class Round:
    """Gives out device blocks for one scheduling turn: offer jobs by priority, then ``commit``.

    A job takes blocks only from jobs that were not offered before it and are not in flight, and
    only if they are enough for it. Blocks for which it waits are promised to it: no job offered
    later gets them. So the job that is offered first always runs in the end, because admission
    refuses a job that does not fit on the device alone.

    Args:
        in_flight, going_on: as for ``KVManager.start_round``.
        holds_steps: whether the last round holds steps until its transfers end.
    """

    def __init__(
        self,
        parts: RoundParts,
        now: float,
        in_flight: Collection[int],
        going_on: Collection[int] | None,
        *,
        holds_steps: bool,
    ) -> None:
        self.taken: list[Job] = []
        self.stalled: list[Job] = []
        """Jobs that would run, but for a transfer."""
        self.holds_steps = holds_steps
        """No step may be sent until all transfers have ended. ``commit`` decides it anew, unless
        the round is too early."""
        self._parts = parts
        self._strategy = parts.strategy
        self._device = parts.tiers.device
        self._away = parts.tiers.away
        self._have_kv = parts.holders.numbers
        staying = set(in_flight).difference(going_on or ())  # the policy does not offer these
        self.prefixes = parts.prefixes.start_round(parts.holders.with_numbers(staying))
        self.state = RoundState(
            parts.tiers, parts.order, now, in_flight, going_on, self.prefixes.copies.sources
        )
        self._num_settled = len(staying)  # holders that the policy does not offer any more
        self._is_closed_to_new = False
        self._is_too_early = False
        self._has_no_victims = False
        self._candidates: list[Job] = []  # the first jobs that may leave
        # Device blocks that are free when the running steps end. If they are enough for a job, no
        # other job has to leave for it.
        self._num_ending = parts.tiers.num_of_ended_not_leaving
        if going_on is not None:
            self._num_ending += sum(map(self._device.num_held, staying))

    def find_prefix(self, job: Job) -> None:
        """Let a job that has computed nothing use what others have computed of its first tokens.

        It takes over kept blocks, unless more urgent jobs wait for those. It plans to copy what
        running jobs have, if its own blocks are free: the blocks of jobs that would leave for it
        may be the ones to copy.
        """
        prefixes = self._parts.prefixes
        if not prefixes.is_on or job.number in self._away or prefixes.is_published(job):
            return
        is_new = job.number not in self._have_kv
        if is_new and self._is_closed_to_new:
            return
        fits = self._fits(job)
        may_take_over = is_new and (fits or not self.state.num_promised)
        self.prefixes.find(job, may_take_over=may_take_over, may_copy=fits)

    def offer(self, job: Job, num_tokens: int) -> Answer:
        """Give the job blocks for its next ``num_tokens`` tokens, if need be from less urgent jobs.

        A job that the policy does not offer, for want of tokens, may lose its blocks.
        """
        is_new = job.number not in self._have_kv
        if not is_new:
            self._num_settled += 1
        elif self._is_closed_to_new:
            return self._pass_over(_NO_ROOM)
        elif self._strategy == "defer" and not self._parts.holders.admit(job):
            self._is_closed_to_new = True
            return self._pass_over(_NO_ROOM)
        self.state.offered.add(job.number)
        if job.number in self._away:
            return self._bring_back(job, num_tokens)
        # A job that does not fit would copy nothing, so it does not wait for a prefix.
        if self.prefixes.is_coming(job) and self._fits(job):
            self.state.num_promised += self._device.missing(job.number, job.num_tokens)
            return self._pass_over(_WAITS_FOR_PREFIX)
        num_ready = job.num_ready + num_tokens
        missing = self._device.missing(job.number, num_ready)
        if missing:
            keeps_work = is_new and self._keeps_work(job)
            if keeps_work and not self._leaves_room_to_grow(missing):
                self._turn_away_new(job)
                return self._pass_over(_NO_ROOM)
            if not self._reserve(job, missing, keeps_work=keeps_work):
                if keeps_work:
                    self._turn_away_new(job)
                self._is_closed_to_new |= is_new
                return self._wait_or_pass_over(job, is_moving=False)
            self._device.grow(job.number, num_ready)
        num_reused = self.prefixes.on_taken(job, num_tokens)
        if is_new:
            self._parts.holders.add(job)
            self._num_settled += 1
            self._parts.counters.prefix_cached_tokens += num_reused
        self.state.busy.add(job.number)
        self.taken.append(job)
        if is_new or missing:
            counters = self._parts.counters
            counters.peak_blocks = max(counters.peak_blocks, self._device.num_used)
        return TAKEN

    def commit(self) -> RoundResult:
        """End the round, and look ahead. Called once, after the last offer."""
        state, tiers = self.state, self._parts.tiers
        if self._is_too_early:
            verdict = StepVerdict.TOO_EARLY
        else:
            self.holds_steps = self._strategy == "reactive" or self._is_worth_waiting()
            verdict = StepVerdict.SEND
            if self.holds_steps and tiers.num_transfers:
                self.stalled += self.taken  # they wait with the others
                verdict = StepVerdict.HOLD
            elif self._strategy == "proactive":
                self._parts.look_ahead.on_round_end(state)
        return RoundResult(verdict, state.transfers, self.prefixes.copies)

    def _pass_over(self, answers: tuple[Answer, ...]) -> Answer:
        """The one of these answers, see ``_answers``, that says what is closed by now."""
        is_settled = self._is_closed_to_new and self._num_settled >= len(self._have_kv)
        if is_settled or self._is_too_early:
            return answers[_ALL]
        # Nobody gets another block, so no job returns from the host.
        is_closed_to_host = self._has_no_victims and self.state.num_spare < 0
        return answers[_NEW * self._is_closed_to_new + _HOST * is_closed_to_host]

    def _fits(self, job: Job) -> bool:
        """Whether the free blocks hold all tokens of the job."""
        return self.state.has_free(self._device.missing(job.number, job.num_tokens))

    def _bring_back(self, job: Job, num_tokens: int) -> Answer:
        """The job's KV is on the host or moves. Start to bring it back, if there is room."""
        tiers = self._parts.tiers
        if tiers.is_swapped_out(job.number):
            room_for = job.num_computed + num_tokens
            if self._reserve(job, self._device.blocks_for(room_for), keeps_work=False):
                self._parts.swapping.swap_in(job, room_for, self.state)
        is_moving = tiers.transfer(job.number) is not None
        return self._wait_or_pass_over(job, is_moving=is_moving)

    def _wait_or_pass_over(self, job: Job, *, is_moving: bool) -> Answer:
        """The job does not run now. It waits if its KV moves, or if swap-outs free its blocks."""
        if is_moving or self._is_coming():
            self.stalled.append(job)
            return self._pass_over(_WAITS_FOR_COPIES)
        return self._pass_over(_NO_ROOM)

    def _keeps_work(self, job: Job) -> bool:
        """Whether nobody may have to compute again for this new job."""
        return self._strategy == "proactive" and not self._parts.order.has_turn(job)

    def _turn_away_new(self, job: Job) -> None:
        """The new job is not begun, nor is any other in this round."""
        self._is_closed_to_new = True
        self._parts.prefixes.give_back_of(job)  # jobs that have begun may need these blocks

    def _leaves_room_to_grow(self, num_blocks: int) -> bool:
        """Whether the jobs on the device can still grow if a new job takes ``num_blocks``."""
        parts = self._parts
        growth = parts.holders.num_on_device * _GROWTH_BLOCKS - parts.tiers.host.num_free
        return growth <= 0 or self.state.has_free(num_blocks + growth)

    def _reserve(self, job: Job, num_blocks: int, *, keeps_work: bool) -> bool:
        """Whether ``num_blocks`` blocks are free for the job now. If not, start to free them and
        promise them to the job.

        Args:
            keeps_work: nobody may compute KV again for the job. If somebody would have to, nothing
                is promised, so that jobs that have begun go on.
        """
        state, parts = self.state, self._parts
        shortage = num_blocks - state.num_spare - self._num_ending
        shortage -= parts.prefixes.give_back(shortage, state.offered)
        if shortage > 0 and not self._has_no_victims:
            victims = self._victims(shortage)
            if keeps_work and victims and not parts.swapping.can_swap_out(victims, state):
                return False
            if not state.running.isdisjoint(victim.number for victim in victims):
                self._is_too_early = True
                return False
            # Later in the round more is promised and fewer jobs are idle.
            self._has_no_victims = not victims
            for victim in victims:
                if not parts.swapping.swap_out(victim, state):
                    parts.holders.drop(victim)
        if state.has_free(num_blocks):
            return True
        state.num_promised += num_blocks
        if self._num_ending and job.number in state.running and not self._is_coming():
            # The job would be set aside for less urgent jobs.
            self._is_too_early |= state.num_spare + self._num_ending >= 0
        return False

    def _is_coming(self) -> bool:
        """Whether the unfinished swap-outs free all blocks that are promised by now."""
        return self._parts.tiers.num_leaving > 0 and self.state.num_spare >= 0

    def _victims(self, num_blocks: int) -> list[Job]:
        """Jobs that hold ``num_blocks`` blocks and may leave, the last to run first. None if even
        all such jobs hold fewer."""
        state, num_held = self.state, self._device.num_held
        candidates = self._candidates
        candidates[:] = [job for job in candidates if state.may_leave(job)]
        count = 0
        while num_blocks > 0:
            if count == len(candidates):
                job = next(state.last_on_device, None)
                if job is None:
                    return []
                if not state.may_leave(job):
                    continue
                candidates.append(job)
            num_blocks -= num_held(candidates[count].number)
            count += 1
        return candidates[:count]

    def _is_worth_waiting(self) -> bool:
        """Whether holding the step for pending copies costs the runnable jobs less than another
        iteration's delay costs the stalled ones. So it is with small models, whose copies are
        short."""
        state, costs = self.state, self._parts.costs
        num_runnable = len(self.taken) if state.is_ahead else len(state.busy)
        if not state.transfers or not num_runnable:
            return False
        copies_s = costs.longest_s(self._parts.tiers.num_in_transfer)
        return copies_s * num_runnable <= costs.least_iteration_s * len(self.stalled)
