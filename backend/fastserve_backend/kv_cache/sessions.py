"""KV of paused sessions, which is held for their next turns.

When a turn of a session ends, its KV stays on the device. While the link is idle it is copied to
the host, and stays there when jobs need its device blocks. From there it is written to the disk, if
there is one and the host is filling. It is given up when it gets too old (``SessionHistory.ttl_s``)
or jobs need its blocks: **held KV never keeps a block from a job**. When the next turn arrives, it
gets the KV of the tokens that both begin with, as soon as that is on the device or the host. From
then on the turn is like a preempted job: it keeps its KV or is swapped as the policy wants.

KV of the session that paused last is held longest. Pauses have long tails: a session that has
paused for long will probably pause for long still. So the least recent KV is worth least. Of
several tenants, the one that has most gives way first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.held_turns import HeldTurn, HeldTurns
from fastserve_backend.kv_cache.holders import Holders
from fastserve_backend.kv_cache.prefixes import Prefixes
from fastserve_backend.kv_cache.session_history import SessionHistory, SessionKey
from fastserve_backend.kv_cache.session_reuse import SessionReuse
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import DiskTransfer, Transfer, TransferKind
from fastserve_backend.metrics.counters import EngineCounters

# Most seconds of one copy to the host, since jobs may need the link or the blocks next.
_COPY_S = 0.005
# Copies leave this share of the host free for copies of jobs.
_COPY_HOST_FREE = 0.25
# KV is written to the disk when less than this share of the host is free. So a turn that returns
# while there is room costs no write.
_DISK_HOST_FREE = 0.5
# A turn waits for its read this long, or as long as computing takes if that is longer. Then the
# disk is not as fast as it was.
_LONGEST_READ_S = 2.0
# A turn that begins with less than this share of the held tokens gets none. It would have far more
# blocks than it needs.
_LEAST_SHARE = 0.5
_log = logging.getLogger(__name__)


class HeldSessions:
    """Owns all held KV, and gives it to jobs.

    Args:
        rotary_switch: as for ``KVManager``.
    """

    def __init__(
        self,
        tiers: TwoTierKV,
        holders: Holders,
        prefixes: Prefixes,
        config: KVCacheSection,
        costs: SwapCosts,
        history: SessionHistory | None,
        counters: EngineCounters,
        rotary_switch: int | None,
    ) -> None:
        self._tiers = tiers
        self._disk = tiers.disk
        self._holders = holders
        self._prefixes = prefixes
        self._costs = costs
        self._history = history
        self._counters = counters
        self._reuse = SessionReuse(tiers.has_windows, rotary_switch)
        # Strategy defer promises blocks to jobs before they run.
        self._is_on = config.strategy != "defer"
        self._swaps_are_lossy = config.swaps_are_lossy
        # All in order of their ends, the least recent first.
        self._turns: OrderedDict[SessionKey, HeldTurn] = OrderedDict()
        self._uncopied: OrderedDict[int, HeldTurn] = OrderedDict()  # not all of it on the host
        self._on_device, self._on_host = HeldTurns(), HeldTurns()  # on the host, not on the device
        self._on_disk: dict[int, HeldTurn] = {}  # alone, also during a read
        self._with_slots = HeldTurns()  # on the disk too, and not being read
        self._reads: list[DiskTransfer] = []  # not sent to the ranks yet
        self._arriving: dict[int, Job] = {}
        self.arriving = self._arriving.keys()
        """Numbers of the jobs that wait until nothing copies the KV that they get, or until it has
        been read from the disk."""

    def __len__(self) -> int:
        """Sessions with held KV."""
        return len(self._turns)

    # --- Turns --------------------------------------------------------------------------------

    def on_arrival(self, job: Job, now: float) -> None:
        """A new job, perhaps the next turn of a session."""
        if self._history is None or SessionKey.of(job) is None:
            return
        self._history.on_arrival(job, now)
        self._arriving[job.number] = job
        self._give_kv(job, now)

    def on_end(self, job: Job, now: float) -> bool:
        """A job ended, and no step runs it. Returns whether its KV is held from now on; if not, the
        caller frees it."""
        self._arriving.pop(job.number, None)
        key = SessionKey.of(job)
        if self._history is None or key is None:
            return False
        self._history.on_end(job, now)
        num_tokens = self._num_to_hold(job)
        if num_tokens == 0:
            return False
        if key in self._turns:
            self._give_up(self._turns[key])
        is_on_device = self._tiers.device.num_held(job.number) > 0
        if is_on_device:
            self._prefixes.publish(job)
        self._holders.remove(job)
        self._tiers.hold(job.number)
        # Without what would keep the client's stream alive.
        turn = self._turns[key] = HeldTurn(key, replace(job, sink=None), num_tokens, now)
        if is_on_device:
            self._on_device.add(turn)
            self._uncopied[job.number] = turn
        else:
            self._hold_on_host(turn)
        return True

    def start_round(self, now: float) -> None:
        """KV that is too old is given up, and turns get what can be given now."""
        while self._turns:
            turn = next(iter(self._turns.values()))
            if self._history is None or now - turn.since_s <= self._history.ttl_s:
                break
            self._give_up(turn)
        for job in list(self._arriving.values()):
            self._give_kv(job, now)

    def _num_to_hold(self, job: Job) -> int:
        """Of how many tokens the ended job's KV may be held. 0: of none."""
        assert self._history is not None
        transfer = self._tiers.transfers.of(job.number)
        if (
            not self._is_on
            or self._history.ttl_s == 0
            or job.finish_reason is FinishReason.ERROR
            or self._holders.get(job.number) is not job
            or (transfer is not None and transfer.kind is not TransferKind.WRITE_BACK)
        ):
            return 0
        return self._reuse.num_to_hold(job)

    def _give_kv(self, job: Job, now: float) -> None:
        """Give an arriving job what its session holds, unless that is being copied or read."""
        key = SessionKey.of(job)
        turn = None if key is None else self._turns.get(key)
        num_tokens = 0
        if turn is not None:
            if not self._tiers.is_idle(turn.job.number):
                return
            num_tokens = self._reuse.num_common(turn.job, turn.num_tokens, job)
            if num_tokens < _LEAST_SHARE * turn.num_tokens:
                num_tokens = 0
            elif turn.job.number in self._on_disk:
                if self._waits_for_read(turn, num_tokens, now):
                    return
                num_tokens = 0
            if num_tokens:
                num_tokens = self._tiers.num_of_use(turn.job.number, num_tokens)
            if num_tokens:
                self._hand_over(turn, job, num_tokens)
            else:
                self._give_up(turn)
        del self._arriving[job.number]
        self._counters.session_hit_tokens += num_tokens
        self._counters.session_miss_tokens += len(job.prompt_ids) - num_tokens

    def _hand_over(self, turn: HeldTurn, job: Job, num_tokens: int) -> None:
        self._forget(turn)
        self._prefixes.forget(turn.job)
        is_on_device = self._tiers.device.num_held(turn.job.number) > 0
        self._tiers.hand_over(turn.job.number, job.number, num_tokens)
        if self._swaps_are_lossy:
            job.num_swaps = turn.job.num_swaps
        self._holders.add(job, num_tokens)
        if is_on_device:
            self._prefixes.publish(job)

    # --- Room for jobs ------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        """Device blocks that ``free_device`` can free at once."""
        return self._tiers.held.idle_device

    def free_device(self, num_blocks: int) -> None:
        """Make ``num_blocks`` blocks of the device free, or as many as possible."""
        if not self._turns:
            return
        for turn in self._on_device.leaving_order():
            if self._tiers.device.num_free >= num_blocks:
                return
            if self._tiers.is_idle(turn.job.number):
                self._leave_device(turn)

    def free_host(self, num_blocks: int) -> None:
        """Make ``num_blocks`` blocks of the host free, or as many as possible."""
        if not self._turns:
            return
        self._free_host_alone(num_blocks)
        host = self._tiers.host
        for turn in self._on_device.leaving_order():
            if host.num_free >= num_blocks:
                return
            number = turn.job.number
            if host.num_held(number) and self._tiers.transfers.of(number) is None:
                self._tiers.forget_host(number)
                self._uncopied[number] = turn

    def _free_host_alone(self, num_blocks: int) -> None:
        """Free blocks of KV that is not on the device; last of all what the disk is to get."""
        for is_unwritten in (False, True):
            for turn in self._on_host.leaving_order():
                if self._tiers.host.num_free >= num_blocks:
                    return
                if self._disk.is_unwritten(turn.job.number) is is_unwritten:
                    self._leave_host(turn)

    def _leave_host(self, turn: HeldTurn) -> None:
        """Free the host's blocks of KV that is not on the device; what the disk has is held on."""
        number = turn.job.number
        if not self._disk.has(number):
            self._give_up(turn)
            return
        self._tiers.forget_host(number)
        self._on_host.pop(number)
        self._on_disk[number] = turn

    def _leave_device(self, turn: HeldTurn) -> None:
        """Free the turn's device blocks; what the host has is held on."""
        number = turn.job.number
        num_saved = self._tiers.num_saved(number)
        if num_saved == 0 or (num_saved < turn.num_tokens and self._tiers.has_windows):
            self._give_up(turn)
            return
        self._on_device.pop(number)
        turn.num_tokens = min(turn.num_tokens, num_saved)
        self._prefixes.before_leaving(turn.job)
        turn.job.num_swaps += 1
        self._tiers.leave_device(number)
        self._uncopied.pop(number, None)
        self._hold_on_host(turn)

    def _hold_on_host(self, turn: HeldTurn) -> None:
        """The turn's KV is on the host alone from now on."""
        self._on_host.add(turn)
        self._disk.add(turn.job.number, self._tiers.num_saved(turn.job.number))

    def _give_up(self, turn: HeldTurn) -> None:
        """Hold the turn's KV no longer. Device blocks keep their content like those of other ended
        jobs."""
        self._forget(turn)
        self._prefixes.before_leaving(turn.job)
        self._tiers.release(turn.job.number)
        self._prefixes.forget(turn.job)

    def _forget(self, turn: HeldTurn) -> None:
        del self._turns[turn.key]
        for turns in (self._on_device, self._on_host, self._with_slots):
            turns.pop(turn.job.number)
        for others in (self._uncopied, self._on_disk):
            others.pop(turn.job.number, None)
        self._disk.release(turn.job.number)

    # --- Copies to the host -------------------------------------------------------------------

    @property
    def has_to_copy(self) -> bool:
        """Whether ``copy_to_host`` would start a copy."""
        return self._next_to_copy() is not None

    def copy_to_host(self, transfers: list[Transfer]) -> None:
        """Start to copy blocks of the turn that leaves the device first, if the link is idle, and
        add the copy to ``transfers``."""
        turn = self._next_to_copy()
        if turn is None:
            return
        self._free_host_alone(self._missing_on_host(turn) + self._num_left_free)
        block_s = self._costs.link.transfer_s(True, 1)
        max_blocks = max(self._tiers.needs.num_groups, int(_COPY_S / block_s))
        num_free = self._tiers.host.num_free
        if self._missing_on_host(turn) > num_free:  # what was freed had been of use to the turn
            max_blocks = min(max_blocks, num_free)
        keys = self._prefixes.held_keys(turn.job)
        transfer = self._tiers.write_back(turn.job.number, turn.num_tokens, max_blocks, keys)
        if transfer is not None:
            transfers.append(transfer)

    @property
    def _num_left_free(self) -> int:
        return int(_COPY_HOST_FREE * self._tiers.host.num_blocks)

    def _next_to_copy(self) -> HeldTurn | None:
        tiers = self._tiers
        if (
            tiers.host.num_blocks == 0
            or tiers.transfers.num_of(TransferKind.SWAP_OUT)
            or tiers.transfers.num_of(TransferKind.WRITE_BACK)
        ):
            return None
        turn = self._first_uncopied()
        if turn is None:
            return None
        # Only KV that is not on the device makes room for it, and none that the disk is to get.
        num_others = tiers.held.host_alone - self._disk.num_unwritten
        room = tiers.host.num_free + num_others - self._num_left_free
        return turn if self._missing_on_host(turn) <= room else None

    def _first_uncopied(self) -> HeldTurn | None:
        while self._uncopied:
            number, turn = next(iter(self._uncopied.items()))
            if self._tiers.num_saved(number) < turn.num_tokens:
                return turn
            del self._uncopied[number]
        return None

    def _missing_on_host(self, turn: HeldTurn) -> int:
        keys = self._prefixes.held_keys(turn.job)
        return self._tiers.missing_on_host(turn.job.number, turn.num_tokens, keys)

    # --- Copies to and from the disk ------------------------------------------------------------

    @property
    def has_to_write(self) -> bool:
        """Whether ``copy_to_and_from_disk`` would write."""
        if self._disk.next_to_write is None:
            return False
        host, turn = self._tiers.host, self._first_uncopied()
        return host.num_free < _DISK_HOST_FREE * host.num_blocks or (
            turn is not None and self._missing_on_host(turn) > host.num_free - self._num_left_free
        )

    def copy_to_and_from_disk(self, transfers: list[DiskTransfer], now: float) -> None:
        """Start the reads for which turns wait, and to write the KV that came to the host first.
        What has been on the disk for the longest time makes room, of the tenant that has most."""
        transfers += self._reads
        self._reads.clear()
        if not self.has_to_write:
            return
        number = self._disk.next_to_write
        assert number is not None
        keys = self._prefixes.held_keys(self._on_host.get(number).job)
        for turn in self._with_slots.leaving_order():
            if not self._disk.missing_slots(number, keys):
                break
            if turn.job.number in self._on_disk:
                self._give_up(turn)
            else:
                self._disk.release(turn.job.number)
                self._with_slots.pop(turn.job.number)
        if self._disk.missing_slots(number, keys):  # being read
            self._disk.cannot_write(number)
            return
        self._begin(self._disk.write(number, keys, now), transfers)

    def on_disk_transfer_finished(
        self, transfer: DiskTransfer, *, succeeded: bool, seconds: float
    ) -> None:
        """The ranks have ended the transfer. It took the disk ``seconds``."""
        num_blocks, counters = len(transfer.slots), self._counters
        if not succeeded:
            counters.disk_failures += 1
        else:
            self._costs.disk.observe(transfer.is_write, num_blocks, seconds)
            num_bytes = num_blocks * self._costs.block_bytes
            if transfer.is_write:
                counters.disk_write_bytes += num_bytes
            else:
                counters.disk_read_bytes += num_bytes
        if succeeded:
            self._on_both_sides(transfer)
        elif self._disk.finish(transfer, succeeded=False) and not transfer.is_write:
            self._give_up(self._on_disk[transfer.job_number])

    def _begin(self, transfer: DiskTransfer, transfers: list[DiskTransfer]) -> None:
        """Add the transfer to those that the ranks get, unless there is nothing to copy."""
        if transfer.slots:
            transfers.append(transfer)
        else:
            self._on_both_sides(transfer)

    def _on_both_sides(self, transfer: DiskTransfer) -> None:
        """Host and disk have what the transfer was for."""
        if not self._disk.finish(transfer, succeeded=True):
            return
        number = transfer.job_number
        if transfer.is_write:
            self._with_slots.add(self._on_host.get(number))
            return
        turn = self._on_disk.pop(number)
        self._tiers.take_over_read(number, transfer.owner, transfer.num_tokens)
        self._on_host.add(turn)
        self._with_slots.add(turn)

    def _waits_for_read(self, turn: HeldTurn, num_tokens: int, now: float) -> bool:
        """Whether KV of ``num_tokens`` tokens of use comes from the disk, or will soon. The read is
        started if it pays and the host has room."""
        number, costs = turn.job.number, self._costs
        read = self._disk.transfer(number)
        if read is not None:
            is_slow = now - read.started_s > max(_LONGEST_READ_S, costs.prefill_s(num_tokens))
            if is_slow:
                _log.warning("reading KV from the disk takes too long, so it is computed again")
                self._counters.disk_failures += 1
            return not is_slow
        keys = self._prefixes.held_keys(turn.job)
        num_free, num_read = self._disk.missing_on_host(number, keys)
        if not costs.read_is_cheaper(num_tokens, num_read):
            return False
        self.free_host(num_free)
        num_free, _ = self._disk.missing_on_host(number, keys)
        if self._tiers.host.num_free < num_free:
            return False
        # Its pause is over: it is not too old while it is read.
        turn.since_s = now
        self._turns.move_to_end(turn.key)
        self._with_slots.pop(number)
        self._begin(self._disk.read(number, keys, now), self._reads)
        return True
