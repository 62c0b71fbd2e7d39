"""Who has KV blocks on the device, who waits on the host, who computes again.

One round a scheduling turn: ``begin``; the policy offers jobs to ``take`` in order of priority; the
step loop sends the copies that ``transfers`` returns. Pure decisions: ranks copy. What a round is
made of has files of its own: ``device_room`` knows whom blocks are promised to and who leaves for
them, ``swapping`` whether that is to the host, ``look_ahead`` what may move before it is needed,
``prefix_cache`` and ``shared_prefixes`` what need not be computed.

Strategies (FastServe §4.2, Fig. 15):

* ``defer``: a new job is admitted only if its longest possible KV is free; nobody loses any.
* ``recompute``: when blocks are short the least urgent jobs lose their KV and compute it again.
* ``reactive``: the same jobs are swapped to the host instead, and back when they are to run; steps
  wait for the copies.
* ``proactive``: the same, but other jobs run meanwhile, unless the copies are so short that waiting
  for them costs less. And copies begin before they are needed: blocks are kept free for arrivals,
  the jobs that run next return early, and idle link time copies full blocks of those that will
  leave. A new job is not begun where that makes others compute again, unless it starves.
"""

from __future__ import annotations

from collections.abc import Collection

from fastserve_backend.config import KVCacheSection
from fastserve_backend.job import Job
from fastserve_backend.kv_cache.device_room import DeviceRoom
from fastserve_backend.kv_cache.holders import Holders
from fastserve_backend.kv_cache.look_ahead import LookAhead
from fastserve_backend.kv_cache.prefix_cache import PrefixCache
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys
from fastserve_backend.kv_cache.round import Round, RunningOrder
from fastserve_backend.kv_cache.shared_prefixes import PrefixCopies, SharedPrefixes
from fastserve_backend.kv_cache.swap_costs import SwapCosts
from fastserve_backend.kv_cache.swapping import Swapping
from fastserve_backend.kv_cache.tiers import Transfer, TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters

# Where no job can be swapped, a new job is begun only if each job on the device may still grow by
# so many blocks. Otherwise those would soon take each other's KV, and compute it again.
_GROWTH_BLOCKS = 4


class KVManager:
    """Owns ``tiers``; changes ``num_computed`` of jobs that lose KV, and ``num_shared``; counts
    swaps of jobs."""

    def __init__(
        self,
        tiers: TwoTierKV,
        order: RunningOrder,
        config: KVCacheSection,
        costs: SwapCosts,
        counters: EngineCounters,
    ) -> None:
        self.tiers = tiers
        self._order = order
        self._strategy = config.strategy
        self._costs = costs
        self._counters = counters
        self._keys = PrefixKeys(config, tiers.device.block_size)
        self._prefix_cache = PrefixCache(tiers.device, self._keys)
        self._shared = SharedPrefixes(tiers.device, self._keys, costs)
        self._holders = Holders(tiers, self._prefix_cache, self._shared, counters)
        self._have_kv = self._holders.numbers
        self._swapping = Swapping(tiers, self._holders, self._shared, config, costs, counters)
        self._room = DeviceRoom(tiers, self._holders, self._prefix_cache, self._swapping)
        self._look_ahead = LookAhead(
            tiers, self._holders, self._prefix_cache, self._swapping, self._room, config, costs
        )
        self._admitted: dict[int, int] = {}  # strategy defer: job → blocks that it may come to need
        self._num_admitted_blocks = 0
        self._holds_steps = False
        self._round = Round(0.0, order)
        self.begin(0.0, in_flight=())

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be sent before all copies have ended."""
        return self._holds_steps and self.tiers.num_transfers > 0

    @property
    def num_swapped_out(self) -> int:
        """Jobs whose KV is on the host alone, or on its way there."""
        return sum(not self.tiers.may_run(job.number) for job in list(self._holders))

    def arrived(self, job: Job, now: float) -> None:
        """To be called before the policy learns of the job: what others have computed it need not.
        It is given none of that before it is to run, since a more urgent job may need it first."""
        self._look_ahead.arrived(job, now)
        self._shared.share(job)
        job.num_shared = max(job.num_shared, self._prefix_cache.num_kept_tokens(job))

    def begin(
        self, now: float, in_flight: Collection[int], going_on: Collection[int] | None = None
    ) -> None:
        """A new round.

        Args:
            in_flight: the jobs of unfinished steps, which keep what they have.
            going_on: while a step runs, for the one after it: those of ``in_flight`` that may be in
                that too. The others end with theirs.
        """
        last = self._round
        for job in last.stalled:
            job.swap_stall_s += now - last.now
        for job in last.taken:
            job.num_shared = 0  # of those whose step was not sent
        self._prefix_cache.give_back_unused()
        self._holders.place_moved(self._order)
        busy, running, is_ahead = set(in_flight), set(going_on or ()), going_on is not None
        staying = busy - running
        self._round = Round(now, self._order, busy, running, is_ahead, num_settled=len(staying))
        self._shared.begin(self._holders.of(staying))
        self._swapping.begin(self._round)
        self._room.begin(self._round, ending=staying if is_ahead else ())

    @property
    def is_too_early(self) -> bool:
        """Whether a job that runs would have to leave for a more urgent one, or waits for blocks of
        one that ends with it, which takes the end of its step: what was taken in this round must
        not be sent."""
        return self._room.is_too_early

    @property
    def is_exhausted(self) -> bool:
        this = self._round
        is_settled = this.refuses_new and this.num_settled >= len(self._have_kv)
        return is_settled or self._room.is_too_early

    @property
    def refuses_new(self) -> bool:
        """No job without KV would be taken from now on in this round."""
        return self._round.refuses_new

    @property
    def refuses_host(self) -> bool:
        """No job whose KV is on the host would get it back from now on in this round."""
        return self._room.is_exhausted

    @property
    def is_waiting(self) -> bool:
        """Whether the job that was offered last was not taken because others are about to compute
        what it would."""
        return self._round.is_waiting

    @property
    def copies(self) -> PrefixCopies:
        """To be made with the step of the jobs that were taken in this round, before it runs."""
        return self._shared.copies

    def sent(self) -> None:
        """That step was sent. The sources of its copies stay as they are until ``copied``."""
        for job in self._round.taken:
            self._holders.computes(job)
        num_copied = len(self.copies.from_blocks)
        self._counters.prefix_cached_tokens += num_copied * self.tiers.device.block_size
        for number in self.copies.sources:
            self.tiers.begin_read(number)
        self._shared.sent()

    def copied(self, copies: PrefixCopies) -> None:
        """The step that they were sent with has ended."""
        for number in copies.sources:
            self.tiers.end_read(number)

    def recall(self, job: Job) -> None:
        """Find what a job that has computed nothing need not compute: it gets what was kept of its
        first tokens, if no other waits for those blocks, and is to copy what running jobs have."""
        if not self._may_begin(job):
            return
        if self._round.refuses_new and job.number not in self._have_kv:
            return
        fits = self._room.fits(job)
        if (fits or not self._room.num_promised) and job.number not in self._have_kv:
            self._prefix_cache.recall(job)
        # Who needs others' blocks might need those that it is to copy.
        if fits:
            self._shared.share(job)
        else:
            job.num_shared = 0

    def take(self, job: Job, num_tokens: int) -> bool:
        """Give the job blocks for its next ``num_tokens`` tokens, if need be from less urgent jobs.

        A job takes blocks only from jobs that were not offered before it and are not in flight, and
        only if that makes it fit. What it waits for, no less urgent job gets. (One that the policy
        passes over for want of tokens is not offered, and may lose its blocks.) So the first job
        offered always runs at last: admission refuses a job that the device cannot hold alone.

        A job that would begin while others compute what it begins with waits for that, if that is
        sooner.
        """
        this = self._round
        this.is_waiting = False
        is_new = job.number not in self._have_kv
        if not is_new:
            this.num_settled += 1
        elif this.refuses_new:
            return False
        elif self._strategy == "defer" and not self._admit(job):
            this.refuses_new = True
            return False
        this.offered.add(job.number)
        may_run = self.tiers.may_run(job.number)
        begins = may_run and self._may_share(job)
        # Where it does not fit it would copy nothing.
        if begins and self._shared.is_coming(job) and self._room.fits(job):
            self._room.promise_all(job)  # for what it is to copy
            this.is_waiting = True
            return False
        if not may_run:
            self._bring_back(job, num_tokens)
            return False
        device, room_for = self.tiers.device, job.num_ready + num_tokens
        if missing := device.missing(job.number, room_for):
            keeps_work = is_new and self._strategy == "proactive" and not self._order.has_turn(job)
            if keeps_work and not self._leaves_room_to_grow(missing):
                this.refuses_new = True
                self._prefix_cache.give_back_of(job)  # those that have begun may need it
                return False
            if not self._room.make(job, missing, keeps_work=keeps_work):
                this.refuses_new |= is_new
                if keeps_work:
                    self._prefix_cache.give_back_of(job)
                if self._room.is_coming():
                    this.stalled.append(job)
                return False
            device.grow(job.number, room_for)
        if job.num_shared:
            self._shared.copy(job)
        if self._keys.is_on and (begins or num_tokens > 1):
            self._shared.computes(job, room_for)
        if is_new:
            self._holders.add(job)
            this.num_settled += 1
            self._counters.prefix_cached_tokens += self._prefix_cache.used(job)
        this.busy.add(job.number)
        this.taken.append(job)
        if is_new or missing:
            self._counters.peak_blocks = max(self._counters.peak_blocks, device.num_used)
        return True

    def transfers(self) -> list[Transfer]:
        """The copies to begin, in this order. Ends the round."""
        if self.is_too_early:
            return self._swapping.begun
        self._holds_steps = self._strategy == "reactive" or self._is_worth_waiting()
        if self.holds_steps:
            self._round.stalled += self._round.taken  # they wait with the others
        elif self._strategy == "proactive":
            self._look_ahead.look(self._round)
        return self._swapping.begun

    def transfer_ended(self, job_number: int, *, succeeded: bool, seconds: float) -> None:
        """The ranks have ended the job's transfer; it took the link ``seconds``."""
        self._look_ahead.expect_change()
        self._swapping.ended(job_number, succeeded=succeeded, seconds=seconds)

    def release(self, job: Job) -> None:
        """The job ended and no step uses its blocks."""
        self._look_ahead.expect_change()
        self._num_admitted_blocks -= self._admitted.pop(job.number, 0)
        self._holders.release(job)
        self._keys.forget(job)

    def _leaves_room_to_grow(self, num_blocks: int) -> bool:
        """Whether a new job may take so many blocks, and the jobs on the device can still grow."""
        growth = self._holders.num_on_device * _GROWTH_BLOCKS - self.tiers.host.num_free
        return growth <= 0 or self._room.has(num_blocks + growth)

    def _may_begin(self, job: Job) -> bool:
        """Whether the job could run now, for the first time since it last had no KV."""
        return self._may_share(job) and self.tiers.may_run(job.number)

    def _may_share(self, job: Job) -> bool:
        """Whether others could have something of its tokens, and it has none of that yet."""
        return self._keys.is_on and not self._shared.knows(job)

    def _admit(self, job: Job) -> bool:
        device = self.tiers.device
        needed = device.blocks_for(len(job.prompt_ids) + job.params.max_tokens)
        if self._num_admitted_blocks + needed > device.num_blocks:
            return False
        self._admitted[job.number] = needed
        self._num_admitted_blocks += needed
        return True

    def _bring_back(self, job: Job, num_tokens: int) -> None:
        """A job whose KV is elsewhere, or on its way, needs it for its next ``num_tokens``."""
        if self.tiers.is_swapped_out(job.number):
            room_for = job.num_computed + num_tokens
            if self._room.make(job, self.tiers.device.blocks_for(room_for)):
                self._swapping.swap_in(job, room_for)
        if self.tiers.transfer(job.number) is not None or self._room.is_coming():
            self._round.stalled.append(job)

    def _is_worth_waiting(self) -> bool:
        """Whether all who may run lose less by waiting for all copies than those that they are for
        by waiting for an iteration without them. A small model's copies are that short."""
        this = self._round
        may_run = this.taken if this.is_ahead else this.busy
        if not self._swapping.begun or not may_run:
            return False
        return self._costs.longest_s(self.tiers.num_in_transfer) * len(may_run) <= (
            self._costs.least_iteration_s * len(this.stalled)
        )
