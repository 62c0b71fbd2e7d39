"""KV of paused sessions in files: what is there, what is written next, and unfinished copies.

Only slot numbers are kept here. Each rank has a file with as many slots of a block each
(``worker/disk_store.py``). KV that is on the host alone is written ahead, so that its host blocks
can be freed at once when they are needed. A read brings it back to the host. What is on the other
side already, of whatever job, is not copied.

Nobody waits for a write. If the host's blocks are needed before it ends, they are freed all the
same, and what the write leaves in its slots is ignored.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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

    def missing_slots(self, job_number: int, keys: Sequence[bytes]) -> int:
        """Slots that are to become free before the unwritten job can be written.

        Args:
            keys: as for ``write``.
        """
        num_tokens = self._unwritten[job_number].num_tokens
        needed, _ = self.slots.missing_but_for(job_number, num_tokens, num_tokens, keys)
        return max(0, needed - self.slots.num_free)

    def write(self, job_number: int, keys: Sequence[bytes], now: float) -> DiskTransfer:
        """Start to write the unwritten job, for which slots are free.

        Args:
            keys: of the job's first blocks of a group, as far as their KV is exact.
        """
        num_tokens = self._unwritten[job_number].num_tokens
        transfer_id = next(self._ids)
        owner = disk_transfer_owner(transfer_id)
        new = self.slots.grow_from(owner, num_tokens, num_tokens, keys)
        host_blocks = self._blocks_at(self._host, job_number, new)
        slots = self._blocks_at(self.slots, owner, new)
        return self._start(
            DiskTransfer(transfer_id, job_number, True, host_blocks, slots, num_tokens, keys, now)
        )

    def cannot_write(self, job_number: int) -> None:
        """There are no slots for the unwritten job: it stays on the host alone."""
        self.num_unwritten -= self._unwritten.pop(job_number).num_blocks

    def missing_on_host(self, job_number: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """
        Args:
            keys: as for ``write``.

        Returns:
            the free host blocks that ``read`` takes, and how many blocks it reads.
        """
        num_tokens = self._saved[job_number]
        return self._host.missing_but_for(job_number, num_tokens, num_tokens, keys)

    def read(self, job_number: int, keys: Sequence[bytes], now: float) -> DiskTransfer:
        """Start to read the job's KV into free blocks of the host, which must be enough.

        Args:
            keys: as for ``write``.
        """
        num_tokens = self._saved.pop(job_number)
        transfer_id = next(self._ids)
        owner = disk_transfer_owner(transfer_id)
        new = self._host.grow_from(owner, num_tokens, num_tokens, keys)
        self.slots.hand_over(job_number, owner)
        host_blocks = self._blocks_at(self._host, owner, new)
        slots = self._blocks_at(self.slots, owner, new)
        return self._start(
            DiskTransfer(transfer_id, job_number, False, host_blocks, slots, num_tokens, keys, now)
        )

    def finish(self, transfer: DiskTransfer, *, succeeded: bool) -> bool:
        """The transfer has ended. After a failed write nothing is written any more, and nobody else
        reads what could not be read.

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
        # The host's blocks of a write that nobody wants may have been used for something else.
        if succeeded and (is_wanted or not transfer.is_write):
            filled = self.slots if transfer.is_write else self._host
            num_full = filled.num_full_blocks(transfer.num_tokens)
            filled.publish(transfer.owner, transfer.keys[:num_full])
        elif not succeeded and not transfer.is_write:
            self.slots.withdraw(transfer.owner)
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
        used = {slot for number in self._saved for slot in self.slots.all_blocks(number)}
        for transfer in self._unfinished.values():
            slots, owner = self.slots.all_blocks(transfer.owner).tolist(), transfer.owner
            assert set(transfer.slots) <= set(slots), "a transfer lost its slots"
            of_read = [] if transfer.is_write else transfer.host_blocks
            assert set(of_read) <= set(self._host.all_blocks(owner).tolist())
            used.update(slots)
        assert len(used) == self.slots.num_used, "slots of no job"
        assert self._saved.keys().isdisjoint(self._unwritten), "written twice"
        for number, transfer in self._wanted.items():
            assert transfer.id in self._unfinished
            assert transfer.is_write == (number in self._unwritten)
        held = {number: self._host.num_held(number) for number in self._unwritten}
        assert held == {number: one.num_blocks for number, one in self._unwritten.items()}
        assert self.num_unwritten == sum(held.values()), "unwritten host blocks"

    @staticmethod
    def _blocks_at(pool: BlockPool, number: int, places: Sequence[range]) -> array[int]:
        """
        Args:
            places: as ``BlockPool.grow_from`` returns them.
        """
        blocks = array("i")
        for kind, of_kind in enumerate(places):
            if of_kind:
                blocks.extend(pool.blocks_at(number, kind, of_kind))
        return blocks

    def _start(self, transfer: DiskTransfer) -> DiskTransfer:
        self._unfinished[transfer.id] = self._wanted[transfer.job_number] = transfer
        return transfer
