"""KV in two tiers: which blocks of a job are on the device, which on the host, which on their way.

Pure bookkeeping; ranks copy. The host holds a prefix of a job's KV: blocks that are full never
change, so what was copied once stays good while the job runs on, and only what came after has to be
copied when the job is swapped out again.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastserve_backend.kv_cache.blocks import BlockPool


class TransferKind(enum.Enum):
    SWAP_OUT = "swap_out"
    """Device to host; the device's blocks are free when it ends."""
    WRITE_BACK = "write_back"
    """Device to host, full blocks ahead of a swap-out; the job may run meanwhile."""
    SWAP_IN = "swap_in"
    """Host to device; the job may run when it ends."""

    @property
    def is_out(self) -> bool:
        return self is not TransferKind.SWAP_IN


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of blocks, ``device_blocks[i]`` to or from ``host_blocks[i]``."""

    id: int
    job_number: int
    kind: TransferKind
    device_blocks: array[int]
    host_blocks: array[int]
    num_tokens: int
    """Tokens of the job, from its first, that both tiers have when it ends."""


class TwoTierKV:
    """Owns the block tables of both tiers and the unfinished transfers, at most one a job.

    A job is in one of these states; only in the first two may it run:

    * without KV;
    * on the device, perhaps with a prefix on the host, perhaps with a write-back under way;
    * swapped out, or being swapped out or in.

    The blocks of an unfinished transfer stay in the tables of their job until it ends, also if the
    job ends before: nobody else can get them (invariant 1 of docs/architecture.md). So do those of
    a job that is read from for others.

    Args:
        incremental: keep what is on the host when the job returns to the device.
    """

    def __init__(
        self, num_device_blocks: int, num_host_blocks: int, block_size: int, *, incremental: bool
    ) -> None:
        self.device = BlockPool(num_device_blocks, block_size)
        self.host = BlockPool(num_host_blocks, block_size)
        self._block_size = block_size
        self._incremental = incremental
        self._saved: dict[int, int] = {}  # job → tokens of its KV that are good on the host
        self._transfers: dict[int, Transfer] = {}  # job → its unfinished transfer
        self._readers: dict[int, int] = {}  # job → steps that copy from its device blocks
        # Jobs that ended meanwhile → what their device blocks are to keep.
        self._ended: dict[int, Sequence[bytes]] = {}
        self._ids = itertools.count()
        # What is asked of all jobs in each decision, kept up to date with each change of a job.
        self._swapped_out: set[int] = set()
        self._copies: dict[int, int] = {}  # job → its host blocks
        self._num_of_kind = dict.fromkeys(TransferKind, 0)
        self.num_copies = 0
        """Host blocks of all jobs of ``has_copy``."""
        self.num_leaving = 0
        """Device blocks that are free when the swap-outs under way have ended."""
        self.num_in_transfer = 0
        """Blocks that the unfinished transfers copy."""

    @property
    def num_transfers(self) -> int:
        """Unfinished ones."""
        return len(self._transfers)

    @property
    def num_swapped_out(self) -> int:
        """Jobs whose KV is on the host alone."""
        return len(self._swapped_out)

    def num_unfinished(self, kind: TransferKind) -> int:
        """Transfers of this kind."""
        return self._num_of_kind[kind]

    @property
    def num_of_ended(self) -> int:
        """Device blocks of jobs that have ended."""
        return sum(map(self.device.num_held, self._ended))

    @property
    def num_ended(self) -> int:
        """Device blocks of jobs that have ended, which are free when what still copies them has
        too; without ``num_leaving``."""
        return sum(
            self.device.num_held(number)
            for number in self._ended
            if (transfer := self.transfer(number)) is None
            or transfer.kind is not TransferKind.SWAP_OUT
        )

    def transfers(self) -> Iterable[Transfer]:
        """The unfinished ones."""
        return self._transfers.values()

    def transfer(self, job_number: int) -> Transfer | None:
        """The job's unfinished transfer."""
        return self._transfers.get(job_number)

    def num_saved(self, job_number: int) -> int:
        """Tokens of the job, from its first, whose KV is good on the host."""
        return self._saved.get(job_number, 0)

    def has_copy(self, job_number: int) -> bool:
        """Whether the job's KV is on the device, some of it on the host too, and none moves."""
        return job_number in self._copies

    def is_read(self, job_number: int) -> bool:
        """Whether others copy the job's device blocks."""
        return job_number in self._readers

    def is_swapped_out(self, job_number: int) -> bool:
        """Whether the job's KV is on the host alone; it has no transfer then."""
        return job_number in self._swapped_out

    def may_run(self, job_number: int) -> bool:
        """Whether all the job's KV, if it has any, is on the device and stays there."""
        transfer = self._transfers.get(job_number)
        if transfer is not None:
            return transfer.kind is TransferKind.WRITE_BACK
        return not self.is_swapped_out(job_number)

    def num_to_copy(self, job_number: int, num_tokens: int) -> int:
        """Blocks that a swap-out of the job's ``num_tokens`` tokens would copy."""
        saved = self.num_saved(job_number)
        if saved == num_tokens:
            return 0
        return self.device.blocks_for(num_tokens) - saved // self._block_size

    def swap_out(self, job_number: int, num_tokens: int) -> Transfer | None:
        """Move the job's KV of ``num_tokens`` tokens to the host.

        The job must be on the device, without a transfer. None: the host has it all, and the
        device's blocks are free already.

        Raises:
            OutOfBlocksError: the host has no room; nothing has changed.
        """
        first = self.num_saved(job_number) // self._block_size
        num_blocks = self.num_to_copy(job_number, num_tokens)
        self.host.grow(job_number, num_tokens)
        if num_blocks == 0:
            self.device.release(job_number)
            self._count(job_number)
            return None
        self.num_leaving += self.device.num_held(job_number)
        return self._begin(TransferKind.SWAP_OUT, job_number, num_tokens, first, num_blocks)

    def write_back(self, job_number: int, num_tokens: int, max_blocks: int) -> Transfer | None:
        """Copy the first of the job's full blocks that the host has not. None: nothing to copy.

        The job must be on the device, without a transfer.

        Raises:
            OutOfBlocksError: the host has no room; nothing has changed.
        """
        first = self.num_saved(job_number) // self._block_size
        num_blocks = min(max_blocks, self.device.num_blocks_full(num_tokens) - first)
        if num_blocks <= 0:
            return None
        num_saved = (first + num_blocks) * self._block_size
        self.host.grow(job_number, num_saved)
        return self._begin(TransferKind.WRITE_BACK, job_number, num_saved, first, num_blocks)

    def swap_in(self, job_number: int, room_for: int) -> Transfer:
        """Move the swapped-out job to the device, with blocks for ``room_for`` tokens.

        Raises:
            OutOfBlocksError: the device has no room; nothing has changed.
        """
        num_tokens = self._saved[job_number]
        self.device.grow(job_number, max(room_for, num_tokens))
        num_blocks = self.device.blocks_for(num_tokens)
        return self._begin(TransferKind.SWAP_IN, job_number, num_tokens, 0, num_blocks)

    def finish(self, job_number: int, *, succeeded: bool) -> None:
        """The job's transfer has ended. A failed swap costs the job its KV in both tiers, a failed
        write-back what the host had of it."""
        transfer = self._transfers.pop(job_number)
        self._num_of_kind[transfer.kind] -= 1
        self.num_in_transfer -= len(transfer.device_blocks)
        if transfer.kind is TransferKind.SWAP_OUT:
            self.num_leaving -= self.device.num_held(job_number)
        if job_number in self._ended:
            self._release_if_ended(job_number)
        elif not succeeded and transfer.kind is TransferKind.WRITE_BACK:
            self.forget_host(job_number)
        elif not succeeded:
            self.release(job_number)
        elif transfer.kind is TransferKind.SWAP_IN:
            if not self._incremental:
                self.forget_host(job_number)
        else:
            self._saved[job_number] = transfer.num_tokens
            if transfer.kind is TransferKind.SWAP_OUT:
                self.device.release(job_number)
        self._count(job_number)

    def begin_read(self, job_number: int) -> None:
        """A step copies device blocks of the job, which has no swap under way, for another."""
        self._readers[job_number] = self._readers.get(job_number, 0) + 1

    def end_read(self, job_number: int) -> None:
        """That step has ended."""
        self._readers[job_number] -= 1
        if self._readers[job_number] == 0:
            del self._readers[job_number]
            self._release_if_ended(job_number)

    def forget_host(self, job_number: int) -> None:
        """Free the host's blocks of a job on the device, without a transfer."""
        self.host.release(job_number)
        self._saved.pop(job_number, None)
        self._count(job_number)

    def release(self, job_number: int, keys: Sequence[bytes] = ()) -> None:
        """The job ended, or its KV is given up: free all its blocks, or as soon as its transfer
        and what others read of it have ended.

        Args:
            keys: as for ``BlockPool.release``, of the device's blocks, if it has any; they are not
                kept if there is a transfer.
        """
        if job_number in self._transfers or job_number in self._readers:
            self._ended[job_number] = () if job_number in self._transfers else keys
            self._count(job_number)
            return
        self.device.release(job_number, keys)
        self.forget_host(job_number)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block of each tier is in exactly one place, and jobs
        hold the blocks of what they are said to have."""
        self.device.check_integrity()
        self.host.check_integrity()
        for number, saved in self._saved.items():
            held = self.host.num_held(number)
            assert 0 < saved <= held * self._block_size, "the host lacks blocks of a saved prefix"
        for number, transfer in self._transfers.items():
            for pool, blocks in (
                (self.device, transfer.device_blocks),
                (self.host, transfer.host_blocks),
            ):
                assert set(blocks) <= set(pool.table(number)), "a transfer lost its blocks"
        self._check_counts()
        used = self._transfers.keys() | self._readers.keys()
        assert self._ended.keys() <= used, "an ended job was forgotten"
        for number in self._readers:
            assert self.may_run(number), "a job that is read from was swapped"
            assert self.device.num_held(number), "a job that is read from lost its blocks"

    def _check_counts(self) -> None:
        unfinished = self._transfers.values()
        leaving = [one.job_number for one in unfinished if one.kind is TransferKind.SWAP_OUT]
        assert self.num_leaving == sum(map(self.device.num_held, leaving)), "leaving blocks"
        assert self.num_in_transfer == sum(len(one.device_blocks) for one in unfinished)
        for kind, count in self._num_of_kind.items():
            assert count == sum(one.kind is kind for one in unfinished), f"transfers: {kind}"
        away = {number for number in self._saved if not self.device.num_held(number)}
        assert self._swapped_out == away, "swapped-out jobs"
        copies = self._saved.keys() - away - self._transfers.keys() - self._ended.keys()
        assert self.num_copies == sum(map(self.host.num_held, copies)), "copies on the host"

    def _count(self, job_number: int) -> None:
        """The job's KV has moved."""
        num_copies = 0
        self._swapped_out.discard(job_number)
        if job_number in self._saved:
            if not self.device.num_held(job_number):
                self._swapped_out.add(job_number)
            elif not (job_number in self._transfers or job_number in self._ended):
                num_copies = self.host.num_held(job_number)
        self.num_copies += num_copies - self._copies.pop(job_number, 0)
        if num_copies:
            self._copies[job_number] = num_copies

    def _release_if_ended(self, job_number: int) -> None:
        is_used = job_number in self._transfers or job_number in self._readers
        if job_number in self._ended and not is_used:
            self.release(job_number, self._ended.pop(job_number))

    def _begin(
        self, kind: TransferKind, job_number: int, num_tokens: int, first: int, num_blocks: int
    ) -> Transfer:
        part = slice(first, first + num_blocks)
        transfer = Transfer(
            id=next(self._ids),
            job_number=job_number,
            kind=kind,
            device_blocks=self.device.table(job_number)[part],
            host_blocks=self.host.table(job_number)[part],
            num_tokens=num_tokens,
        )
        self._transfers[job_number] = transfer
        self._num_of_kind[kind] += 1
        self.num_in_transfer += num_blocks
        self._count(job_number)
        return transfer
