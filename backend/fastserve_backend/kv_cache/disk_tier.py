"""KV of paused sessions in files: what is there, what is written next, and unfinished copies.

Only slot numbers are kept here. Each rank has a file with as many slots of a block each
(``worker/disk_store.py``). KV that is on the host alone is written ahead, so that its host blocks
can be freed at once when they are needed. A read brings it back to the host.

Nobody waits for a write. If the host's blocks are needed before it ends, they are freed all the
same, and what the write leaves in its slots is ignored.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.transfers import DiskTransfer, disk_transfer_owner
from fastserve_backend.rank_protocol.layer_kinds import BlockNeeds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Unwritten:
    num_tokens: int
    num_blocks: int


class DiskTier:
    """Owns the slots. Jobs here are ended ones whose KV is held, by number.

    Args:
        host: from which reads take blocks.
        ids: of transfers; the ranks know no two transfers of the same id.
    """

    def __init__(self, host: BlockPool, num_slots: int, ids: Iterator[int]) -> None:
        self.slots = BlockPool(num_slots, host.block_size, host.kinds)
        self._host = host
        self._needs = BlockNeeds(host.block_size, host.kinds)
        self._ids = ids
        self._takes_writes = num_slots > 0
        # On the host alone, in the order in which they came there.
        self._unwritten: OrderedDict[int, _Unwritten] = OrderedDict()
        self.num_unwritten = 0
        """Host blocks of KV that is on the host alone and is to be written, or being written."""
        self._saved: dict[int, int] = {}  # job → tokens
        self._unfinished: dict[int, DiskTransfer] = {}  # by id
        self._wanted: dict[int, DiskTransfer] = {}  # by job

    def has(self, job_number: int) -> bool:
        """Whether the job's KV can be read from the disk."""
        return job_number in self._saved

    def is_unwritten(self, job_number: int) -> bool:
        """Whether the job's KV is to be written, or being written."""
        return job_number in self._unwritten

    def transfer(self, job_number: int) -> DiskTransfer | None:
        """The job's unfinished transfer."""
        return self._wanted.get(job_number)

    def add(self, job_number: int, num_tokens: int) -> None:
        """The KV of the job's first ``num_tokens`` tokens is on the host alone from now on. It is
        written later, unless the disk is too small."""
        if self._takes_writes and self._needs.computed(num_tokens) <= self.slots.num_blocks:
            num_blocks = self._host.num_held(job_number)
            self._unwritten[job_number] = _Unwritten(num_tokens, num_blocks)
            self.num_unwritten += num_blocks

    @property
    def next_to_write(self) -> int | None:
        """The job that has waited longest to be written. None also while another is written."""
        if not self._unwritten or any(one.is_write for one in self._unfinished.values()):
            return None
        return next(iter(self._unwritten))

    def missing_slots(self, job_number: int) -> int:
        """Slots that are to become free before the unwritten job can be written."""
        needed = self._needs.computed(self._unwritten[job_number].num_tokens)
        return max(0, needed - self.slots.num_free)

    def write(self, job_number: int, now: float) -> DiskTransfer:
        """Start to write the unwritten job, for which slots are free."""
        num_tokens = self._unwritten[job_number].num_tokens
        transfer_id = next(self._ids)
        owner = disk_transfer_owner(transfer_id)
        self.slots.grow(owner, num_tokens, num_tokens)
        host_blocks, end = array("i"), self.slots.blocks_for(num_tokens)
        for index, kind in enumerate(self.slots.kinds):
            places = range(self.slots.first(owner, index) * kind.num_groups, end * kind.num_groups)
            host_blocks.extend(self._host.blocks_at(job_number, index, places))
        slots = self._array(self.slots, owner)
        assert len(host_blocks) == len(slots), "the host lacks blocks of a saved prefix"
        return self._start(
            DiskTransfer(transfer_id, job_number, True, host_blocks, slots, num_tokens, now)
        )

    def cannot_write(self, job_number: int) -> None:
        """There are no slots for the unwritten job: it stays on the host alone."""
        self.num_unwritten -= self._unwritten.pop(job_number).num_blocks

    def read(self, job_number: int, now: float) -> DiskTransfer:
        """Start to read the job's KV into free blocks of the host, which must be enough."""
        num_tokens = self._saved.pop(job_number)
        transfer_id = next(self._ids)
        owner = disk_transfer_owner(transfer_id)
        self._host.grow(owner, num_tokens, num_tokens)
        self.slots.hand_over(job_number, owner)
        host_blocks, slots = self._array(self._host, owner), self._array(self.slots, owner)
        return self._start(
            DiskTransfer(transfer_id, job_number, False, host_blocks, slots, num_tokens, now)
        )

    def finish(self, transfer: DiskTransfer, *, succeeded: bool) -> bool:
        """The transfer has ended. After a failed write nothing is written any more.

        Returns:
            Whether the job still wants it. After a read that succeeded, the host blocks are to be
            taken over from ``transfer.owner`` then.
        """
        del self._unfinished[transfer.id]
        number = transfer.job_number
        is_wanted = self._wanted.get(number) is transfer
        if is_wanted:
            del self._wanted[number]
        if transfer.is_write and not succeeded and self._takes_writes:
            _log.warning("writing KV to the disk failed, so no more is written")
            self._takes_writes = False
            self._unwritten.clear()
            self.num_unwritten = 0
        if is_wanted and succeeded:
            self.slots.hand_over(transfer.owner, number)
            self._saved[number] = transfer.num_tokens
            if transfer.is_write:
                self.num_unwritten -= self._unwritten.pop(number).num_blocks
            return True
        self.slots.release(transfer.owner)
        self._host.release(transfer.owner)
        return is_wanted

    def release(self, job_number: int) -> None:
        """The job's KV is not needed on the disk any more. An unfinished transfer keeps its blocks
        until it ends."""
        self._wanted.pop(job_number, None)
        self._saved.pop(job_number, None)
        self.slots.release(job_number)
        unwritten = self._unwritten.pop(job_number, None)
        if unwritten is not None:
            self.num_unwritten -= unwritten.num_blocks

    def check_integrity(self, device: BlockPool) -> None:
        """Raise AssertionError unless each slot is in exactly one place, and the tables agree with
        what is saved, unwritten and unfinished. None of that may be on the device."""
        self.slots.check_integrity()
        here = self._saved.keys() | self._unwritten.keys() | self._wanted.keys()
        assert not any(map(device.num_held, here)), "on the device and on the disk"
        num_used = sum(map(self.slots.num_held, self._saved))
        for transfer in self._unfinished.values():
            assert transfer.slots == self._array(self.slots, transfer.owner)
            of_read = array("i") if transfer.is_write else transfer.host_blocks
            assert of_read == self._array(self._host, transfer.owner)
            num_used += len(transfer.slots)
        assert num_used == self.slots.num_used, "slots of no job"
        assert self._saved.keys().isdisjoint(self._unwritten), "written twice"
        for number, transfer in self._wanted.items():
            assert transfer.id in self._unfinished
            assert transfer.is_write == (number in self._unwritten)
        held = {number: self._host.num_held(number) for number in self._unwritten}
        assert held == {number: one.num_blocks for number, one in self._unwritten.items()}
        assert self.num_unwritten == sum(held.values()), "unwritten host blocks"

    @staticmethod
    def _array(pool: BlockPool, job_number: int) -> array[int]:
        return array("i", pool.all_blocks(job_number).tobytes())

    def _start(self, transfer: DiskTransfer) -> DiskTransfer:
        self._unfinished[transfer.id] = self._wanted[transfer.job_number] = transfer
        return transfer
