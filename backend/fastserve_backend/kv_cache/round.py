"""One round: the policy's jobs are offered, and each gets KV blocks, waits, or is passed over."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.device_room import DeviceRoom, RoomParts
from fastserve_backend.kv_cache.holders import RoundState
from fastserve_backend.kv_cache.look_ahead import LookAhead
from fastserve_backend.kv_cache.transfers import DiskTransfer, Transfer
from fastserve_backend.offers import EVERYWHERE, TAKEN, OfferAnswer, OfferOutcome

# What is closed, as a sum: the index of ``_answers``. Nothing is 0.
_NEW, _HOST, _ALL = 1, 2, 4


def _answers(outcome: OfferOutcome) -> tuple[OfferAnswer, ...]:
    """The answers of one outcome, by what is closed. They are made once, since a round may pass
    over thousands of jobs."""
    new, host = Place.NOWHERE, Place.HOST
    some = (frozenset[Place](), frozenset({new}), frozenset({host}), frozenset({new, host}))
    return tuple(OfferAnswer(outcome, closed) for closed in (*some, EVERYWHERE))


_NO_ROOM = _answers(OfferOutcome.NO_ROOM)
_WAITS_FOR_COPIES = _answers(OfferOutcome.WAITS_FOR_COPIES)
_WAITS_FOR_PREFIX = _answers(OfferOutcome.WAITS_FOR_PREFIX)


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
    """What to send after a round."""

    verdict: StepVerdict
    transfers: Sequence[Transfer]
    """To start now, in this order, whatever the verdict."""
    disk_transfers: Sequence[DiskTransfer]
    """Likewise. No step waits for them."""


class Round:
    """Gives out device blocks for one step: offer jobs by priority, then ``commit``.

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
        parts: RoomParts,
        look_ahead: LookAhead,
        costs: SwapCosts,
        now: float,
        in_flight: Collection[int],
        going_on: Collection[int] | None,
        *,
        holds_steps: bool,
    ) -> None:
        self.now = now
        self.taken: list[Job] = []
        self.stalled: list[Job] = []
        """Jobs that would run, but for a transfer."""
        self.holds_steps = holds_steps
        """No step may be sent until all transfers have ended. ``commit`` decides it anew, unless
        the round is too early."""
        self._strategy = parts.strategy
        self._tiers = parts.tiers
        self._away = parts.tiers.away
        self._uses_prefixes = parts.prefixes.is_on
        self._look_ahead = look_ahead
        self._sessions = parts.sessions
        self._swapping = parts.swapping
        self._costs = costs
        self._holders = parts.holders
        self._have_kv = parts.holders.numbers
        staying = set(in_flight).difference(going_on or ())  # the policy does not offer these
        self.prefixes = parts.prefixes.for_round(parts.holders.with_numbers(staying))
        self._state = RoundState(parts.tiers, parts.holders, parts.order, now, in_flight, going_on)
        self._busy, self._offered = self._state.busy, self._state.offered
        self._room = DeviceRoom(parts, self._state, ending=() if going_on is None else staying)
        self._num_settled = len(staying)  # holders that the policy does not offer any more
        self._is_closed_to_new = False

    def find_prefix(self, job: Job) -> None:
        """Let a job that has no blocks use what others have computed of its first tokens."""
        if self._uses_prefixes and not self._is_closed_to_new and job.number not in self._have_kv:
            hit = self.prefixes.find(job)
            if self._room.has_free(self._tiers.needs.most(job.num_tokens)):
                self._swapping.refer_on_host(job, hit)

    def offer(self, job: Job, num_tokens: int) -> OfferAnswer:
        """Give the job blocks for its next ``num_tokens`` tokens, if need be from less urgent jobs.

        A job that the policy does not offer, for want of tokens, may lose its blocks.
        """
        is_new = job.number not in self._have_kv
        if not is_new:
            self._num_settled += 1
        elif self._is_closed_to_new:
            return self._pass_over(_NO_ROOM)
        elif self._strategy == "defer" and not self._holders.admit(job):
            self._is_closed_to_new = True
            return self._pass_over(_NO_ROOM)
        self._offered.add(job.number)
        outcome = None
        if job.number in self._away:
            outcome = self._room.bring_back(job, num_tokens)
        elif (
            is_new
            and (num_coming := self.prefixes.num_coming(job))
            # A job that does not fit then would have waited in vain.
            and self._room.promise_if_it_fits(job, self.prefixes.hit(job), num_coming)
        ):
            return self._pass_over(_WAITS_FOR_PREFIX)
        if outcome is None:
            outcome = self._room.give(job, num_tokens, self.prefixes.hit(job), is_new=is_new)
            if outcome is TAKEN.outcome:
                if self._uses_prefixes and (is_new or num_tokens > 1):
                    self.prefixes.on_taken(job, num_tokens)
                if is_new:
                    self._holders.add(job)
                    self._num_settled += 1
                self._busy.add(job.number)
                self.taken.append(job)
                return TAKEN
        self._is_closed_to_new |= is_new
        if outcome is OfferOutcome.NO_ROOM:
            return self._pass_over(_NO_ROOM)
        self.stalled.append(job)
        return self._pass_over(_WAITS_FOR_COPIES)

    def commit(self) -> RoundResult:
        """End the round, and look ahead. Called once, after the last offer."""
        verdict = StepVerdict.SEND
        if self._room.is_too_early:
            verdict = StepVerdict.TOO_EARLY
        else:
            self.holds_steps = self._strategy == "reactive" or self._pays_to_hold_step()
            if self.holds_steps and self._tiers.transfers:
                verdict = StepVerdict.HOLD
                self.stalled += self.taken  # they wait with the others
            elif self._strategy == "proactive":
                self._look_ahead.on_round_end(self._state, self._room)
        if self._strategy == "proactive" or not self._offered:
            self._sessions.copy_to_host(self._state.transfers)
        disk_transfers: list[DiskTransfer] = []
        self._sessions.copy_to_and_from_disk(disk_transfers, self.now)
        return RoundResult(verdict, self._state.transfers, disk_transfers)

    def _pass_over(self, answers: tuple[OfferAnswer, ...]) -> OfferAnswer:
        """The answer that says what is closed by now, from a tuple that ``_answers`` made."""
        is_settled = self._is_closed_to_new and self._num_settled >= len(self._have_kv)
        if is_settled or self._room.is_too_early:
            return answers[_ALL]
        # If nobody gets another block, no job returns from the host.
        return answers[_NEW * self._is_closed_to_new + _HOST * self._room.is_exhausted]

    def _pays_to_hold_step(self) -> bool:
        """Whether holding the step for pending copies costs the runnable jobs less than another
        iteration's delay costs the stalled ones. So it is with small models, whose copies are
        short."""
        state, costs = self._state, self._costs
        num_runnable = len(self.taken) if state.is_ahead else len(state.busy)
        if not state.transfers or not num_runnable:
            return False
        copies_s = costs.link.longest_s(self._tiers.transfers.num_blocks)
        return copies_s * num_runnable <= costs.least_iteration_s * len(self.stalled)
