"""Who gets the device's free blocks, and who leaves when they are short."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.holders import Holders
from fastserve_backend.kv_cache.prefix_cache import PrefixCache
from fastserve_backend.kv_cache.round import Round
from fastserve_backend.kv_cache.swapping import Swapping
from fastserve_backend.kv_cache.tiers import TwoTierKV


class DeviceRoom:
    """Owns what is promised in a round to jobs that wait for blocks: those that are offered later
    do not get it."""

    def __init__(
        self, tiers: TwoTierKV, holders: Holders, prefix_cache: PrefixCache, swapping: Swapping
    ) -> None:
        self._tiers = tiers
        self._holders = holders
        self._prefix_cache = prefix_cache
        self._swapping = swapping

    def begin(self, this: Round, ending: Collection[int]) -> None:
        """A round.

        Args:
            ending: jobs that end with the running step.
        """
        self._round = this
        # Nobody need leave for what these blocks are enough for.
        self._ending_blocks = self._tiers.num_ended + sum(map(self._tiers.device.num_held, ending))
        self._has_no_victims = False
        self._last: Iterator[Job] | None = None  # on the device, from the first shortage on
        self._candidates: list[Job] = []  # the first of those that may leave
        self.num_promised = 0
        """Blocks that more urgent jobs wait for."""
        self.is_too_early = False
        """Whether one that runs would have to leave, or waits for blocks of one that ends."""

    @property
    def num_spare(self) -> int:
        """Blocks beside what was promised that are free when the swap-outs under way have ended;
        less than 0: so many more were promised."""
        return self._tiers.device.num_free + self._tiers.num_leaving - self.num_promised

    @property
    def is_exhausted(self) -> bool:
        """Whether nobody gets another block in this round."""
        return self._has_no_victims and self.num_spare < 0

    def has(self, num_blocks: int) -> bool:
        """Whether so many blocks are free beside what was promised."""
        return num_blocks + self.num_promised <= self._tiers.device.num_free

    def fits(self, job: Job) -> bool:
        """Whether all tokens of the job do."""
        return self.has(self._missing(job))

    def promise_all(self, job: Job) -> None:
        """The blocks that the job needs for all its tokens stay free."""
        self.num_promised += self._missing(job)

    def make(self, job: Job, num_blocks: int, *, keeps_work: bool = False) -> bool:
        """Whether the job can have ``num_blocks`` blocks now; begins to free them if not, and
        promises them to it.

        Args:
            keeps_work: nobody computes KV again for it. Where that is not possible the job is
                promised nothing, so that those that have begun go on.
        """
        shortage = num_blocks - self.num_spare - self._ending_blocks
        shortage -= self._prefix_cache.give_back(shortage, self._round.offered)
        if shortage > 0 and not self._has_no_victims:
            victims = self._victims(shortage)
            if keeps_work and victims and not self._swapping.can_swap_out(victims):
                return False
            if not self._round.running.isdisjoint(victim.number for victim in victims):
                self.is_too_early = True
                return False
            # Later in the round more is promised and fewer jobs are idle.
            self._has_no_victims = not victims
            for victim in victims:
                if not self._swapping.swap_out(victim):
                    self._holders.drop(victim)
        if self.has(num_blocks):
            return True
        self.num_promised += num_blocks
        ending = self._ending_blocks
        if ending and job.number in self._round.running and not self.is_coming():
            # It would be set aside for less urgent ones.
            self.is_too_early |= self.num_spare + ending >= 0
        return False

    def is_coming(self) -> bool:
        """Whether what was promised up to now is free when the swap-outs under way have ended."""
        return self._tiers.num_leaving > 0 and self.num_spare >= 0

    def _missing(self, job: Job) -> int:
        return self._tiers.device.missing(job.number, job.num_tokens)

    def _victims(self, num_blocks: int) -> list[Job]:
        """Jobs that have to go for ``num_blocks`` blocks, the last to run first; none if even all
        have fewer."""
        this, num_held = self._round, self._tiers.device.num_held
        if self._last is None:
            self._last = this.by_urgency(Place.DEVICE, last_first=True)
        candidates = self._candidates
        candidates[:] = [job for job in candidates if self._holders.may_leave(job, this)]
        count = 0
        while num_blocks > 0:
            if count == len(candidates):
                job = next(self._last, None)
                if job is None:
                    return []
                if not self._holders.may_leave(job, this):
                    continue
                candidates.append(job)
            num_blocks -= num_held(candidates[count].number)
            count += 1
        return candidates[:count]
