"""Who gets the device's blocks in one round, and who leaves when they are short."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fastserve_backend.config_sections import SwapStrategy
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.freed_blocks import FreedBlocks
from fastserve_backend.kv_cache.holders import Holders, RoundState, RunningOrder
from fastserve_backend.kv_cache.prefixes import Prefixes, PrefixHit
from fastserve_backend.kv_cache.sessions import HeldSessions
from fastserve_backend.kv_cache.swapping import Swapping
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import TransferKind
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.offers import TAKEN, OfferOutcome

# Where no job can be swapped, a new job starts only if each job on the device can still grow by so
# many blocks of each group. Otherwise those would soon take each other's KV and compute it again.
_GROWTH_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class RoomParts:
    """The parts of the KV cache with which every round's room works."""

    strategy: SwapStrategy
    tiers: TwoTierKV
    prefixes: Prefixes
    holders: Holders
    swapping: Swapping
    sessions: HeldSessions
    order: RunningOrder
    counters: EngineCounters


class DeviceRoom:
    """Gives blocks to jobs, and promises blocks to jobs that wait for them. A job that is offered
    later gets no promised block.

    Args:
        ending: jobs that end with the running step.
    """

    def __init__(self, parts: RoomParts, state: RoundState, ending: Collection[int]) -> None:
        self.num_promised = 0
        self.is_too_early = False
        """A running job would have to leave, or a job waits for blocks of one that ends."""
        self._parts = parts
        self._state = state
        self._device = parts.tiers.device
        # Blocks that are free when the running steps end. If they are enough for a job, nobody has
        # to leave for it.
        # Blocks of running jobs that become free when the running step ends, because they lie
        # before windows then.
        self._unseen = [
            self._device.unseen_blocks(job.number, job.num_computed)
            for job in parts.holders.with_numbers(state.running)
            if self._device.has_windows and parts.tiers.transfers.of(job.number) is None
        ]
        # Jobs whose blocks become free when the running steps or transfers end.
        self._ending = (*parts.tiers.ended_not_leaving, *ending)
        _, self._num_ending = self._free_ending()
        self._has_no_victims = False
        self._candidates: list[Job] = []  # the first jobs that may leave

    @property
    def num_spare(self) -> int:
        """Blocks that are free once the unfinished swap-outs end and sessions hold none, without
        promised ones. Negative: more blocks are promised than will be free."""
        tiers = self._parts.tiers
        return self._device.num_free + tiers.leaving.num_alone - self.num_promised

    @property
    def is_exhausted(self) -> bool:
        """Nobody gets another block in this round."""
        return self._has_no_victims and self.num_spare < 0

    def has_free(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` blocks are free now, or held by sessions, without promised ones.
        ``make_free`` frees them."""
        missing = num_blocks + self.num_promised - self._device.num_free
        return missing <= 0 or missing <= self._parts.sessions.num_idle

    def make_free(self, num_blocks: int) -> None:
        """Free what sessions hold of so many blocks for which ``has_free`` is true."""
        if num_blocks > self._device.num_free:
            self._parts.sessions.free_device(num_blocks)

    def promise_if_it_fits(self, job: Job, hit: PrefixHit, num_coming: int) -> bool:
        """Promise a job without blocks those for all its tokens, if they are free. Returns whether
        they are.

        Args:
            hit: the blocks that it gets from others.
            num_coming: blocks of a group that it will get behind those.
        """
        needs = self._parts.tiers.needs
        num_others = num_coming * needs.num_groups + sum(
            kind.num_groups * len(part) for kind, part in zip(needs.kinds, hit.parts, strict=False)
        )
        missing = max(0, needs.most(job.num_tokens) - num_others)
        missing += self._device.num_cached(hit.keys, hit.parts)
        if not self.has_free(missing):
            return False
        self.num_promised += missing
        return True

    def give(self, job: Job, num_tokens: int, hit: PrefixHit, *, is_new: bool) -> OfferOutcome:
        """Give a new job, or one on the device, blocks to run its next ``num_tokens`` tokens.

        Args:
            hit: what a new job gets from others.
        """
        device, first_token, num_cached = self._device, job.num_ready, 0
        if is_new and hit.keys:
            # As long as the job refers to them, nobody else gets them.
            num_cached = device.num_cached(hit.keys, hit.parts)
            device.refer_to(job.number, hit.keys, hit.parts)
        missing = device.missing(job.number, first_token + num_tokens, first_token)
        if missing or num_cached:
            num_promised = self.num_promised
            outcome = self._give_missing(job, first_token + num_tokens, missing, is_new=is_new)
            if outcome is not TAKEN.outcome:
                if is_new:
                    device.release(job.number)
                if self.num_promised > num_promised:
                    self.num_promised += num_cached
                return outcome
        if is_new or missing:
            counters = self._parts.counters
            num_used = device.num_used - self._parts.tiers.held.device
            counters.peak_blocks = max(counters.peak_blocks, num_used)
        return TAKEN.outcome

    def bring_back(self, job: Job, num_tokens: int) -> OfferOutcome | None:
        """A job whose KV is on the host or moves needs it for its next ``num_tokens`` tokens. Start
        to bring it back, if there is room. None: its KV is on the device now, since others have
        all of it there."""
        tiers, swapping = self._parts.tiers, self._parts.swapping
        if tiers.is_swapped_out(job.number):
            room_for = job.num_computed + num_tokens
            needed = swapping.missing_to_return(job, room_for)
            if self._reserve(job, needed, keeps_work=False):
                # What left for it may have been of use to it, so that it needs more now.
                needed = swapping.missing_to_return(job, room_for)
                if needed > self._device.num_free:
                    self.num_promised += needed
                else:
                    swapping.swap_in(job, room_for, self._state)
                    if tiers.may_run(job.number):
                        return None
        is_moving = tiers.transfers.of(job.number) is not None
        return (
            OfferOutcome.WAITS_FOR_COPIES
            if is_moving or self._will_cover_promises()
            else OfferOutcome.NO_ROOM
        )

    def _give_missing(
        self, job: Job, num_tokens: int, missing: int, *, is_new: bool
    ) -> OfferOutcome:
        parts = self._parts
        # With this strategy no job of the same priority computes again for a new job, unless that
        # starves.
        keeps_work = is_new and parts.strategy == "proactive" and not parts.order.has_turn(job)
        if keeps_work and not self._leaves_room_to_grow(job, missing):
            return OfferOutcome.NO_ROOM
        if self._reserve(job, missing, keeps_work=keeps_work):
            self._device.grow(job.number, num_tokens, job.num_ready)
            return OfferOutcome.TAKEN
        return (
            OfferOutcome.WAITS_FOR_COPIES if self._will_cover_promises() else OfferOutcome.NO_ROOM
        )

    def _leaves_room_to_grow(self, job: Job, num_blocks: int) -> bool:
        """Whether the jobs on the device can still grow if a new job takes ``num_blocks``. Less
        urgent jobs need not grow, and make room in both tiers."""
        tiers, state = self._parts.tiers, self._state
        growth_of_one = _GROWTH_BLOCKS * tiers.needs.num_groups
        growth = self._parts.holders.num_on_device * growth_of_one
        growth -= tiers.host.num_free + tiers.held.idle_host
        if growth <= 0 or self.has_free(num_blocks + growth):
            return True
        num_behind = 0  # device blocks of less urgent jobs
        for other in state.less_urgent(job, Place.DEVICE):
            num_behind += self._device.num_alone(other.number)
            growth -= growth_of_one
            if growth <= 0 or self.has_free(num_blocks + growth - num_behind):
                return True
        for other in state.less_urgent(job, Place.HOST):
            growth -= tiers.host.num_alone(other.number)
            if growth <= 0 or self.has_free(num_blocks + growth - num_behind):
                return True
        return False

    def _reserve(self, job: Job, num_blocks: int, *, keeps_work: bool) -> bool:
        """Whether ``num_blocks`` blocks are free for the job now. If not, start to free them and
        promise them to the job.

        Args:
            keeps_work: no job of the same priority may compute KV again for the job. If one would
                have to, nothing is promised, so that jobs that have begun go on.
        """
        state, parts = self._state, self._parts
        shortage = num_blocks - self.num_spare - self._num_ending
        if shortage > 0 and not self._has_no_victims:
            victims = self._victims(job, shortage)
            if keeps_work and victims and not parts.swapping.can_swap_out_for(job, victims, state):
                return False
            if not state.running.isdisjoint(victim.number for victim in victims):
                self.is_too_early = True
                return False
            # Later in the round more is promised and fewer jobs are idle.
            self._has_no_victims = not victims
            # The host may lack room for all. Then the least urgent jobs compute again.
            for victim in sorted(victims, key=lambda victim: victim.effective_priority):
                if not parts.swapping.swap_out(victim, state):
                    parts.holders.drop(victim)
        if self.has_free(num_blocks):
            self.make_free(num_blocks)
            return True
        self.num_promised += num_blocks
        if self._num_ending and not self._will_cover_promises() and self._would_be_overtaken(job):
            self.is_too_early |= self.num_spare + self._num_ending >= 0
        return False

    def _would_be_overtaken(self, job: Job) -> bool:
        """Whether less urgent jobs would run in the step for which ``job`` has no blocks."""
        state = self._state
        return state.is_ahead and (
            job.number in state.running or any(True for _ in state.less_urgent(job, Place.DEVICE))
        )

    def _will_cover_promises(self) -> bool:
        """Whether swap-outs are unfinished, and all blocks that are promised by now are free when
        they end."""
        transfers = self._parts.tiers.transfers
        return transfers.num_of(TransferKind.SWAP_OUT) > 0 and self.num_spare >= 0

    def _free_ending(self) -> tuple[FreedBlocks, int]:
        """To count what becomes free behind all that will be without any decision; and how many
        blocks the ends of running steps and transfers free."""
        freed = FreedBlocks(self._device, self._parts.tiers.leaving)
        num_ending = sum(map(freed.add, self._ending)) + sum(map(freed.add_blocks, self._unseen))
        return freed, num_ending

    def _victims(self, job: Job, num_blocks: int) -> list[Job]:
        """Jobs that hold ``num_blocks`` blocks and may leave for ``job``, the last to run first.
        None if even all such jobs hold fewer. More urgent jobs never leave."""
        state, candidates = self._state, self._candidates
        freed, _ = self._free_ending()
        candidates[:] = [candidate for candidate in candidates if state.may_leave(candidate)]
        count = 0
        while num_blocks > 0:
            if count == len(candidates):
                candidate = next(state.last_on_device, None)
                if candidate is None:
                    return []
                if not state.may_leave(candidate):
                    continue
                candidates.append(candidate)
            if candidates[count].effective_priority < job.effective_priority:
                return []
            num_blocks -= freed.add(candidates[count].number)
            count += 1
        return candidates[:count]
