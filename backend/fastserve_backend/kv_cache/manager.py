"""Who has KV blocks on the device, who waits on the host, who computes again.

One round a scheduling turn: ``begin``; the policy offers jobs to ``take`` in order of priority; the
step loop sends the copies that ``transfers`` returns. Pure decisions: ranks copy.

Strategies (FastServe §4.2, Fig. 15):

* ``defer``: a new job is admitted only if its longest possible KV is free; nobody loses any.
* ``recompute``: when blocks are short the least urgent jobs lose their KV and compute it again.
* ``reactive``: the same jobs are swapped to the host instead, and back when they are to run; steps
  wait for the copies.
* ``proactive``: the same, but other jobs run meanwhile, unless the copies are so short that waiting
  for them costs less. And copies begin before they are needed: blocks are kept free for arrivals,
  the jobs that run next return early, and idle link time copies full blocks of those that will
  leave.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Protocol

from fastserve_backend.config import KVCacheSection
from fastserve_backend.counters import EngineCounters
from fastserve_backend.job import Job
from fastserve_backend.kv_cache.burst_reserve import BurstReserve
from fastserve_backend.kv_cache.prefix_cache import PrefixCache
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys
from fastserve_backend.kv_cache.shared_prefixes import PrefixCopies, SharedPrefixes
from fastserve_backend.kv_cache.swap_costs import SwapCosts
from fastserve_backend.kv_cache.tiers import Transfer, TransferKind, TwoTierKV

# Jobs return ahead of time into this share of the device less than others have to leave. Without
# such a band a job at the border would leave and return with every change of the order above it.
_BAND = 0.1
# Jobs on their way back at once, ahead of time: with more the link would still carry old decisions
# when the order changes.
_MAX_RETURNING = 2
# The order changes little from one round to the next, and sorting all jobs with KV would cost each
# iteration a millisecond with some hundreds of them. So it is looked at when blocks were freed or
# jobs came, and in between only each so many rounds.
_LOOK_AHEAD_ROUNDS = 8
# A write-back takes the link for so long at most, since a swap-out may want it next.
_WRITE_BACK_S = 0.005
# Write-backs begin when this share of the device is used, and leave this share of the host free.
_WRITE_BACK_USED = 0.5
_WRITE_BACK_HOST_FREE = 0.25
_log = logging.getLogger(__name__)


class RunningOrder(Protocol):
    """What is asked of the scheduling policy."""

    def urgency(self, now: float) -> Callable[[Job], tuple[float, float]]: ...


@dataclass(slots=True)
class _Round:
    """What one scheduling turn begins with, and has decided so far."""

    now: float
    busy: set[int] = field(default_factory=set)
    """Jobs in flight or taken."""
    running: set[int] = field(default_factory=set)
    """In flight, and may be offered for the step after."""
    num_unoffered: int = 0
    """Holders that the policy may still offer."""
    is_ahead: bool = False
    """Of the end of a step."""
    ending_blocks: int = 0
    """Of jobs in flight that are not offered again."""
    offered: set[int] = field(default_factory=set)
    taken: list[Job] = field(default_factory=list)
    stalled: list[Job] = field(default_factory=list)
    """Would run, but for a copy."""
    beginning: list[Job] = field(default_factory=list)
    """Those taken that may have a prefix of which others know nothing yet."""
    coming: set[bytes] = field(default_factory=set)
    """Keys of what these have when the step has run, and of prefills that are in flight."""
    is_waiting: bool = False
    """The job offered last, for that."""
    copies: PrefixCopies = field(default_factory=PrefixCopies)
    begun: list[Transfer] = field(default_factory=list)
    promised: int = 0
    """Blocks that more urgent jobs wait for."""
    most_host_room: float = math.inf
    """For one job: no more than these blocks."""
    is_too_early: bool = False
    refuses_new: bool = False
    has_no_victims: bool = False
    urgency: Callable[[Job], tuple[float, float]] | None = None


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
        self._writes_back = (
            config.strategy == "proactive" and config.incremental and config.write_back
        )
        self._keys = PrefixKeys(config, tiers.device.block_size)
        self._prefixes = PrefixCache(tiers.device, self._keys)
        self._shared = SharedPrefixes(self._keys)
        self._costs = costs
        self._counters = counters
        self._reserve = BurstReserve(tiers.device.num_blocks)
        self._holders: dict[int, Job] = {}  # jobs with KV of their own in either tier
        self._rounds_to_look = 0  # until the next look ahead
        self._admitted: dict[int, int] = {}  # strategy defer: job → blocks that it may come to need
        self._holds_steps = False
        self._round = _Round(0.0)

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be sent before all copies have ended."""
        return self._holds_steps and self.tiers.num_transfers > 0

    @property
    def num_swapped_out(self) -> int:
        """Jobs whose KV is on the host alone, or on its way there."""
        return sum(not self.tiers.may_run(number) for number in list(self._holders))

    def arrived(self, job: Job, now: float) -> None:
        """To be called before the policy learns of the job: what others have computed it need
        not."""
        self._reserve.add(self.tiers.device.blocks_for(len(job.prompt_ids)), now)
        self._rounds_to_look = 0
        self._prefixes.recall(job)
        self._share(job)

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
        busy, running = set(in_flight), set(going_on or ())
        ending = busy - running if going_on is not None else ()
        self._round = _Round(
            now,
            busy,
            running,
            num_unoffered=len(self._holders) - len(busy) + len(running),
            is_ahead=going_on is not None,
            ending_blocks=sum(self.tiers.device.num_held(number) for number in ending),
        )
        for number in busy - running:
            begun = self._holders.get(number)
            if begun is not None and begun.finish_reason is None and begun.num_pending == 0:
                self._round.coming.update(self._keys.wanted(begun))  # a chunk runs, others follow

    @property
    def is_too_early(self) -> bool:
        """Whether a job that runs would have to leave for a more urgent one, or waits for blocks of
        one that ends with it, which takes the end of its step: what was taken in this round must
        not be sent."""
        return self._round.is_too_early

    @property
    def is_exhausted(self) -> bool:
        this = self._round
        return this.is_too_early or (this.refuses_new and this.num_unoffered <= 0)

    @property
    def is_waiting(self) -> bool:
        """Whether the job that was offered last was not taken because others are about to compute
        what it would."""
        return self._round.is_waiting

    @property
    def copies(self) -> PrefixCopies:
        """To be made with the step of the jobs that were taken in this round, before it runs."""
        return self._round.copies

    def sent(self) -> None:
        """That step was sent. The sources of its copies stay as they are until ``copied``."""
        self._counters.prefix_cached_tokens += (
            len(self.copies.from_blocks) * self.tiers.device.block_size
        )
        for number in self.copies.sources:
            self.tiers.begin_read(number)
        for job in self._round.beginning:
            self._shared.add(job)

    def copied(self, copies: PrefixCopies) -> None:
        """The step that they were sent with has ended."""
        for number in copies.sources:
            self.tiers.end_read(number)

    def recall(self, job: Job) -> None:
        """Find what a job that has computed nothing need not compute: it gets what was kept of its
        first tokens, if no other waits for those blocks, and is to copy what running jobs have."""
        is_new = job.number not in self._holders
        if (is_new and self._round.refuses_new) or not self._may_begin(job):
            return
        fits = self._fits(job)
        if is_new and (fits or not self._round.promised):
            self._prefixes.recall(job)
        # Who needs others' blocks might need those that it is to copy.
        if fits:
            self._share(job)
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
        self._round.is_waiting = False
        is_new = job.number not in self._holders
        if not is_new:
            self._round.num_unoffered -= 1
        elif self._round.refuses_new:
            return False
        elif self._strategy == "defer" and not self._admit(job):
            self._round.refuses_new = True
            return False
        self._round.offered.add(job.number)
        begins = self._may_begin(job)
        if begins and self._is_coming(job):
            self._round.promised += self._missing(job)  # for what it is to copy
            self._round.is_waiting = True
            return False
        if not self.tiers.may_run(job.number):
            if self.tiers.is_swapped_out(job.number):
                self._swap_in(job, num_tokens)
            if self.tiers.transfer(job.number) is not None or self._room_is_coming():
                self._round.stalled.append(job)
            return False
        room_for = job.num_ready + num_tokens
        if not self._make_room(self.tiers.device.missing(job.number, room_for)):
            self._round.refuses_new |= is_new
            if self._room_is_coming():
                self._round.stalled.append(job)
            elif job.number in self._round.running and self._room_is_coming(
                self._round.ending_blocks
            ):
                self._round.is_too_early = True  # it would be set aside for less urgent ones
            return False
        self.tiers.device.grow(job.number, room_for)
        if job.num_shared:
            self._copy_shared(job)
        if begins or num_tokens > 1:
            self._round.beginning.append(job)
            num_blocks = self.tiers.device.num_blocks_full(room_for)
            self._round.coming.update(islice(self._keys.wanted(job), num_blocks))
        self._holders[job.number] = job
        self._counters.prefix_cached_tokens += self._prefixes.used(job)
        self._round.busy.add(job.number)
        self._round.taken.append(job)
        if self.tiers.device.num_used > self._counters.peak_blocks:
            self._counters.peak_blocks = self.tiers.device.num_used
        return True

    def transfers(self) -> list[Transfer]:
        """The copies to begin, in this order. Ends the round."""
        if self._round.is_too_early:
            return self._round.begun
        self._holds_steps = self._strategy == "reactive" or self._is_worth_waiting()
        if self.holds_steps:
            self._round.stalled += self._round.taken  # they wait with the others
        elif self._strategy == "proactive":
            self._look_ahead()
        return self._round.begun

    def _look_ahead(self) -> None:
        if self._rounds_to_look > 0:
            self._rounds_to_look -= 1
            return
        self._rounds_to_look = _LOOK_AHEAD_ROUNDS - 1
        self._swap_ahead()
        if self._writes_back:
            self._write_back()

    def _is_worth_waiting(self) -> bool:
        """Whether all who may run lose less by waiting for all copies than those that they are for
        by waiting for an iteration without them. A small model's copies are that short."""
        may_run = self._round.taken if self._round.is_ahead else self._round.busy
        if not self._round.begun or not may_run:
            return False
        num_blocks = sum(len(transfer.device_blocks) for transfer in self.tiers.transfers())
        return self._costs.longest_s(num_blocks) * len(may_run) <= (
            self._costs.least_iteration_s * len(self._round.stalled)
        )

    def transfer_ended(self, job_number: int, *, succeeded: bool, seconds: float) -> None:
        """The ranks have ended the job's transfer; it took the link ``seconds``."""
        transfer = self.tiers.transfer(job_number)
        assert transfer is not None
        self._rounds_to_look = 0
        if succeeded:
            num_blocks = len(transfer.device_blocks)
            self._costs.observe(transfer.kind.is_out, num_blocks, seconds)
            num_bytes = num_blocks * self._costs.block_bytes
            if transfer.kind.is_out:
                self._counters.swap_out_bytes += num_bytes
            else:
                self._counters.swap_in_bytes += num_bytes
        self.tiers.finish(job_number, succeeded=succeeded)
        job = self._holders.get(job_number)
        if succeeded and job is not None and transfer.kind is TransferKind.SWAP_IN:
            self._shared.add(job)
        if not succeeded and job is not None and transfer.kind is not TransferKind.WRITE_BACK:
            _log.warning("job %s computes its KV again: its %s failed", job.id, transfer.kind.value)
            self._forget(job)

    def release(self, job: Job) -> None:
        """The job ended and no step uses its blocks."""
        self._rounds_to_look = 0
        self._holders.pop(job.number, None)
        self._admitted.pop(job.number, None)
        self._prefixes.forget(job)
        self._shared.remove(job)
        self.tiers.release(job.number, self._prefixes.kept(job))
        self._keys.forget(job)

    # --- Beginnings that jobs have in common --------------------------------------------------

    def _may_begin(self, job: Job) -> bool:
        """Whether the job could run now, for the first time since it last had no KV."""
        return not self._shared.knows(job) and self.tiers.may_run(job.number)

    def _missing(self, job: Job) -> int:
        """Blocks that the job needs for all its tokens, beside those that it has."""
        return self.tiers.device.missing(job.number, job.num_tokens)

    def _fits(self, job: Job) -> bool:
        """Whether the device has room for all its tokens, beside what others wait for."""
        return self._are_free(self._missing(job))

    def _share(self, job: Job) -> None:
        job.num_shared = len(self._shared.find(job)) * self.tiers.device.block_size

    def _is_coming(self, job: Job) -> bool:
        """Whether the job is sooner if it waits for what others are about to compute of its
        beginning. That costs it an iteration, which is the shorter for those that do not wait.
        Where it does not fit it would copy nothing."""
        if not self._round.coming or not self._fits(job):
            return False
        num_ready = self.tiers.device.num_blocks_full(job.num_ready)
        keys = islice(self._keys.wanted(job), num_ready, None)
        num_blocks = sum(1 for _ in takewhile(self._round.coming.__contains__, keys))
        if num_blocks == 0:
            return False
        saved_s = self._costs.prefill_s(num_blocks * self.tiers.device.block_size)
        return saved_s >= 2 * self._costs.least_iteration_s

    def _copy_shared(self, job: Job) -> None:
        """Into blocks that the job has been given."""
        device, copies = self.tiers.device, self._round.copies
        first = device.num_blocks_full(job.num_computed)
        for index, source in enumerate(self._shared.find(job), first):
            copies.from_blocks.append(device.table(source)[index])
            copies.to_blocks.append(device.table(job.number)[index])
            copies.sources.add(source)

    # --- Room on the device -------------------------------------------------------------------

    def _are_free(self, num_blocks: int) -> bool:
        """Whether there are so many blocks beside what was promised."""
        return num_blocks + self._round.promised <= self.tiers.device.num_free

    def _admit(self, job: Job) -> bool:
        device = self.tiers.device
        needed = device.blocks_for(len(job.prompt_ids) + job.params.max_tokens)
        if sum(self._admitted.values()) + needed > device.num_blocks:
            return False
        self._admitted[job.number] = needed
        return True

    def _make_room(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` are free; begins to free them if not, and promises them."""
        device = self.tiers.device
        if num_blocks == 0:
            return True
        coming = self.tiers.num_leaving + self._round.ending_blocks
        shortage = num_blocks + self._round.promised - device.num_free - coming
        shortage -= self._prefixes.give_back(shortage, self._round.offered)
        if shortage > 0 and not self._round.has_no_victims:
            victims = self._victims(shortage)
            if not self._round.running.isdisjoint(victim.number for victim in victims):
                self._round.is_too_early = True
                return False
            # Later in the round more is promised and fewer jobs are idle.
            self._round.has_no_victims = not victims
            for victim in victims:
                self._evict(victim)
        if self._are_free(num_blocks):
            return True
        self._round.promised += num_blocks
        return False

    def _room_is_coming(self, ending_blocks: int = 0) -> bool:
        """Whether what was promised up to now is free when the swap-outs under way have ended, and
        so many blocks more."""
        coming = self.tiers.num_leaving + ending_blocks
        return coming > 0 and self._round.promised <= self.tiers.device.num_free + coming

    def _victims(self, num_blocks: int) -> list[Job]:
        """Jobs that have to go for ``num_blocks`` blocks, the last to run first; none if even all
        have fewer."""
        victims = []
        running = (self._holders[number] for number in self._round.running - self._round.offered)
        jobs = chain(self._idle_on_device(), running)
        for job in sorted(jobs, key=self._key, reverse=True):
            victims.append(job)
            num_blocks -= self.tiers.device.num_held(job.number)
            if num_blocks <= 0:
                return victims
        return []

    def _idle_on_device(self) -> Iterator[Job]:
        """Jobs with blocks on the device that no step, no copy and no job offered uses."""
        busy, offered, sources = self._round.busy, self._round.offered, self.copies.sources
        for number, job in self._holders.items():
            if (
                number not in busy
                and number not in offered
                and number not in sources
                and not self.tiers.is_read(number)
                and self.tiers.transfer(number) is None
                and self.tiers.device.num_held(number)
            ):
                yield job

    def _key(self, job: Job) -> tuple[float, float]:
        if self._round.urgency is None:
            self._round.urgency = self._order.urgency(self._round.now)
        return self._round.urgency(job)

    def _evict(self, job: Job) -> None:
        if self._may_swap(job) and self._make_host_room(job):
            self._swap_out(job)
        else:
            self._drop(job)

    def _may_swap(self, job: Job) -> bool:
        if self._strategy == "recompute" or job.num_computed == 0:
            return False
        return self._strategy == "reactive" or self._swap_is_cheaper(job)

    def _drop(self, job: Job) -> None:
        self._round.num_unoffered -= 1  # if it is offered later, it is as a new job
        self.tiers.release(job.number, self._prefixes.kept(job))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """The job's blocks are gone."""
        del self._holders[job.number]
        self._shared.remove(job)
        if job.num_computed:
            job.num_computed = 0
            self._counters.recomputed_jobs += 1

    # --- Swapping -----------------------------------------------------------------------------

    def _swap_is_cheaper(self, job: Job) -> bool:
        num_copied = self.tiers.num_to_copy(job.number, job.num_computed)
        return self._costs.swap_is_cheaper(
            job,
            blocks_out=num_copied + self.tiers.num_leaving,
            blocks_in=self.tiers.device.blocks_for(job.num_computed),
        )

    def _make_host_room(self, job: Job) -> bool:
        """Whether the host can hold the job's KV; forgets copies of jobs on the device for it,
        those first that will not leave soon."""
        host = self.tiers.host
        missing = host.missing(job.number, job.num_computed)
        if missing <= host.num_free:
            return True
        needed = host.num_held(job.number) + missing
        if needed > self._round.most_host_room:
            return False
        copies = [
            other
            for number, other in self._holders.items()
            if self.tiers.num_saved(number)
            and self.tiers.device.num_held(number)
            and self.tiers.transfer(number) is None
        ]
        room = host.num_free + sum(host.num_held(other.number) for other in copies)
        self._round.most_host_room = room
        if needed > room:
            return False
        for other in sorted(copies, key=self._key):
            if other is not job:
                self.tiers.forget_host(other.number)
                if missing <= host.num_free:
                    break
        return True

    def _swap_out(self, job: Job) -> None:
        num_blocks = self.tiers.device.blocks_for(job.num_computed)
        num_copied = self.tiers.num_to_copy(job.number, job.num_computed)
        self._counters.swap_avoided_bytes += (num_blocks - num_copied) * self._costs.block_bytes
        job.num_swaps += 1
        self._shared.remove(job)
        transfer = self.tiers.swap_out(job.number, job.num_computed)
        if transfer is not None:
            self._round.begun.append(transfer)

    def _swap_in(self, job: Job, num_tokens: int) -> None:
        """Bring the swapped-out job back, with room for its next ``num_tokens`` tokens."""
        room_for = job.num_computed + num_tokens
        if self._make_room(self.tiers.device.blocks_for(room_for)):
            self._round.begun.append(self.tiers.swap_in(job.number, room_for))

    # --- Ahead of time ------------------------------------------------------------------------

    def _swap_ahead(self) -> None:
        """Keep the reserve free, and on the device the jobs that run next (ENST order)."""
        device = self.tiers.device
        reserve = self._reserve.num_blocks(self._round.now)
        has_waiting = any(map(self.tiers.is_swapped_out, self._holders))
        spare = device.num_free + self.tiers.num_leaving - self._round.promised
        if not has_waiting and spare >= reserve:
            return
        returning, leaving = self._misplaced(device.num_blocks - reserve)
        num_on_their_way = sum(
            transfer.kind is TransferKind.SWAP_IN for transfer in self.tiers.transfers()
        )
        returning = returning[: max(0, _MAX_RETURNING - num_on_their_way)]
        wanted = reserve + sum(self._room_to_return(job) for job in returning)
        spare += self._prefixes.give_back(wanted - spare, self._round.offered)
        while leaving and spare < wanted:
            job = leaving.pop()
            if job.num_computed == 0:  # it was taken, but its step was held
                spare += device.num_held(job.number)
                self._drop(job)
            elif self._swap_is_cheaper(job) and self._make_host_room(job):
                spare += device.num_held(job.number)
                self._swap_out(job)
        for job in returning:
            if not self._are_free(self._room_to_return(job) + reserve):
                break
            self._round.begun.append(self.tiers.swap_in(job.number, job.num_tokens))

    def _misplaced(self, capacity: int) -> tuple[list[Job], list[Job]]:
        """Swapped-out jobs that belong on the device and idle ones there that do not, both the
        soonest to run first.

        The jobs that run next belong on the device, as many as have ``capacity`` blocks together.
        """
        device = self.tiers.device
        used = sum(device.num_held(number) for number in self._round.busy)
        idle = {job.number for job in self._idle_on_device()}
        returning, leaving = [], []
        for job in sorted(self._holders.values(), key=self._key):
            if job.number in self._round.busy:
                continue
            if job.number in idle:
                used += device.num_held(job.number)
                if used > capacity:
                    leaving.append(job)
            else:
                used += self._room_to_return(job)
                is_far_inside = used <= capacity - _BAND * device.num_blocks
                if is_far_inside and self.tiers.is_swapped_out(job.number):
                    returning.append(job)
        return returning, leaving

    def _room_to_return(self, job: Job) -> int:
        """Blocks for all tokens of a job, so that its next iteration can follow at once."""
        return self.tiers.device.blocks_for(job.num_tokens)

    def _write_back(self) -> None:
        device, host = self.tiers.device, self.tiers.host
        if (
            device.num_used < _WRITE_BACK_USED * device.num_blocks
            or host.num_free <= _WRITE_BACK_HOST_FREE * host.num_blocks
            or any(transfer.kind.is_out for transfer in self.tiers.transfers())
        ):
            return
        candidates = [
            job
            for job in self._idle_on_device()
            if device.num_blocks_full(job.num_computed) > host.num_held(job.number)
        ]
        if not candidates:
            return
        job = max(candidates, key=self._key)
        max_blocks = max(1, int(_WRITE_BACK_S / self._costs.transfer_s(True, 1)))
        transfer = self.tiers.write_back(
            job.number, job.num_computed, min(max_blocks, host.num_free)
        )
        if transfer is not None:
            self._round.begun.append(transfer)
