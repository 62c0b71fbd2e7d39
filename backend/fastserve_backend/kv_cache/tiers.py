"""KV in two tiers: which blocks of a job are on the device, on the host, or in a transfer.

Only block numbers are kept here; the ranks copy. The host holds a prefix of a job's KV. A full
block never changes, so its copy stays valid while the job runs on. When the job is swapped out
again, only later blocks are copied. For layers with a window, both tiers have only the blocks that
the job's next tokens see.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.disk_tier import DiskTier
from fastserve_backend.kv_cache.held_blocks import HeldBlocks, HeldJobs
from fastserve_backend.kv_cache.transfers import Transfer, TransferKind
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind


class TwoTierKV:
    """Owns the block tables of both tiers and the unfinished transfers, at most one for each job.

    A job is in one of three states, and may run in the first two:

    * without KV;
    * on the device, perhaps with a prefix on the host, perhaps with an unfinished write-back;
    * away: swapped out, or in a swap in either direction.

    The blocks of an unfinished transfer stay in the job's tables until the transfer ends, even if
    the job ends earlier. So nobody else can get them (invariant 1 of docs/architecture.md). The
    same holds for the blocks that a step copies for another job.

    KV of an ended job may be *held* until another job gets it. It is in neither of these states.

    Args:
        incremental: keep the host's blocks when the job returns to the device.
        kinds: of the model's layers.
        step_tokens: most tokens of a job in one step.
        num_disk_blocks: slots of the disk, for held KV alone.
    """

    def __init__(
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        *,
        incremental: bool,
        kinds: Sequence[LayerKind] = ONE_GROUP,
        step_tokens: int = 1,
        num_disk_blocks: int = 0,
    ) -> None:
        self.device = BlockPool(num_device_blocks, block_size, kinds)
        self.host = BlockPool(num_host_blocks, block_size, kinds)
        self.needs = BlockNeeds(block_size, tuple(kinds), step_tokens)
        """Counts the blocks that jobs need."""
        self.has_windows = self.needs.has_windows
        self._block_size = block_size
        self._incremental = incremental
        self._saved: dict[int, int] = {}  # job → its first tokens whose KV is valid on the host
        self._transfers: dict[int, Transfer] = {}  # job → its unfinished transfer
        self._readers: dict[int, int] = {}  # job → steps that copy from its device blocks
        # Jobs that ended during a transfer or a step that copies from them → keys for ``release``.
        self._ended: dict[int, Sequence[bytes]] = {}
        self._ids = itertools.count()
        self.disk = DiskTier(self.host, num_disk_blocks, self._ids)
        # Every decision needs these facts about all jobs, so each change of a job updates them.
        self._swapped_out: set[int] = set()
        self.away: set[int] = set()
        """Jobs that may not run: swapped out, or in a swap."""
        self._copies: dict[int, int] = {}  # job → its host blocks
        self._held = HeldJobs()
        self._num_of_kind = dict.fromkeys(TransferKind, 0)
        self.num_copies = 0
        """Host blocks of all jobs of ``has_copy``."""
        self.num_leaving = 0
        """Device blocks that the unfinished swap-outs will free."""
        self.num_in_transfer = 0
        """Blocks that the unfinished transfers copy."""

    @property
    def held(self) -> HeldBlocks:
        """Blocks of all held KV."""
        return self._held.total

    @property
    def longest_job(self) -> int:
        """Tokens of the longest job that the device holds alone."""
        return self.needs.longest_job(self.device.num_blocks)

    @property
    def num_transfers(self) -> int:
        """Unfinished transfers."""
        return len(self._transfers)

    @property
    def num_swapped_out(self) -> int:
        """Jobs whose KV is only on the host."""
        return len(self._swapped_out)

    def num_unfinished(self, kind: TransferKind) -> int:
        """Unfinished transfers of this kind."""
        return self._num_of_kind[kind]

    @property
    def num_of_ended(self) -> int:
        """Device blocks that ended jobs still hold."""
        return sum(map(self.device.num_held, self._ended))

    @property
    def num_of_ended_not_leaving(self) -> int:
        """Device blocks that ended jobs still hold, without those in ``num_leaving``."""
        return sum(
            self.device.num_held(number)
            for number in self._ended
            if (transfer := self.transfer(number)) is None
            or transfer.kind is not TransferKind.SWAP_OUT
        )

    def transfers(self) -> Iterable[Transfer]:
        """The unfinished transfers."""
        return self._transfers.values()

    def transfer(self, job_number: int) -> Transfer | None:
        """The job's unfinished transfer."""
        return self._transfers.get(job_number)

    def num_saved(self, job_number: int) -> int:
        """How many of the job's first tokens have valid KV on the host."""
        return self._saved.get(job_number, 0)

    def has_copy(self, job_number: int) -> bool:
        """Whether all the job's KV is on the device, a part also on the host, and none moves."""
        return job_number in self._copies

    def is_read(self, job_number: int) -> bool:
        """Whether an unfinished step copies the job's device blocks for another job."""
        return job_number in self._readers

    def is_swapped_out(self, job_number: int) -> bool:
        """Whether the job's KV is only on the host, without a transfer."""
        return job_number in self._swapped_out

    def may_run(self, job_number: int) -> bool:
        """Whether all the job's KV, if it has any, is on the device and stays there."""
        return job_number not in self.away

    def num_to_copy(self, job_number: int, num_tokens: int) -> int:
        """Blocks that a swap-out of the job with ``num_tokens`` tokens would copy."""
        saved = self.num_saved(job_number)
        if saved == num_tokens:
            return 0
        if not self.has_windows:
            return self.device.blocks_for(num_tokens) - saved // self._block_size
        parts = self._unsaved(saved, num_tokens, self.device.blocks_for(num_tokens))
        return sum(
            kind.num_groups * len(part) for kind, part in zip(self.needs.kinds, parts, strict=True)
        )

    def free_before(
        self, job_number: int, position: int, keys: Sequence[bytes] = ()
    ) -> list[range]:
        """Free the blocks, in both tiers, that no token of the job from ``position`` on sees.

        The job must be on the device, without a transfer, and all its steps before ``position`` and
        all steps that copy from it must have ended.

        Args:
            keys: for ``BlockPool.release`` of the device blocks.

        Returns:
            for each kind of layers which device blocks of a group were freed.
        """
        freed = self.device.free_before(job_number, position, keys)
        self._trim_host(job_number, position)
        self._update_facts(job_number)
        return freed

    def swap_out(self, job_number: int, num_tokens: int) -> Transfer | None:
        """Move the job's KV of ``num_tokens`` tokens to the host.

        The job must be on the device, without a transfer. None: the host already has all of it, so
        the device blocks are free at once.

        Raises:
            OutOfBlocksError: the host has no room; nothing has changed.
        """
        self._trim_host(job_number, num_tokens)
        saved = self.num_saved(job_number)
        self.host.grow(job_number, num_tokens, num_tokens)
        if saved == num_tokens:
            self.device.release(job_number)
            self._update_facts(job_number)
            return None
        parts = self._unsaved(saved, num_tokens, self.device.blocks_for(num_tokens))
        self.num_leaving += self.device.num_held(job_number)
        return self._start(TransferKind.SWAP_OUT, job_number, num_tokens, parts)

    def write_back(self, job_number: int, num_tokens: int, max_blocks: int) -> Transfer | None:
        """Copy the job's first full blocks that the host lacks; of held KV also a last block that
        is not full. None: there is nothing to copy.

        The job must be on the device, without a transfer.

        Args:
            num_tokens: tokens whose KV the job has.
            max_blocks: copy so many at most.

        Raises:
            OutOfBlocksError: the host has no room; nothing has changed.
        """
        self._trim_host(job_number, num_tokens)
        saved = self.num_saved(job_number)
        first = max(saved // self._block_size, self._first_seen(num_tokens))
        end = self.device.num_full_blocks(num_tokens)
        if job_number in self._held and saved < num_tokens:
            end = self.device.blocks_for(num_tokens)
        stop = min(first + max_blocks // self.needs.num_groups, end)
        parts = self._unsaved(saved, num_tokens, stop)
        if not any(parts):
            return None
        num_saved = min(num_tokens, stop * self._block_size)
        self.host.grow(job_number, num_saved, num_tokens)
        return self._start(TransferKind.WRITE_BACK, job_number, num_saved, parts)

    def swap_in(self, job_number: int, room_for: int) -> Transfer:
        """Move the swapped-out job to the device, with blocks for ``room_for`` tokens.

        Raises:
            OutOfBlocksError: the device has no room; nothing has changed.
        """
        num_tokens = self._saved[job_number]
        self.device.grow(job_number, max(room_for, num_tokens), num_tokens)
        parts = self._unsaved(0, num_tokens, self.device.blocks_for(num_tokens))
        return self._start(TransferKind.SWAP_IN, job_number, num_tokens, parts)

    def finish(self, job_number: int, *, succeeded: bool) -> None:
        """The job's transfer has ended. If a swap failed, the job loses its KV in both tiers; if a
        write-back failed, only the host's part."""
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
        self._update_facts(job_number)

    def start_read(self, job_number: int) -> None:
        """A step copies device blocks of the job for another job. The job must not be in a swap."""
        self._readers[job_number] = self._readers.get(job_number, 0) + 1
        self._update_held(job_number)

    def end_read(self, job_number: int) -> None:
        """A step that copied the job's blocks has ended."""
        self._readers[job_number] -= 1
        if self._readers[job_number] == 0:
            del self._readers[job_number]
            self._update_held(job_number)
            self._release_if_ended(job_number)

    def hold(self, job_number: int) -> None:
        """The job ended. Its KV stays where it is until ``hand_over`` or ``release``. It must not
        be in a swap."""
        self._held.set_blocks(job_number, HeldBlocks())
        self._update_facts(job_number)

    def is_idle(self, job_number: int) -> bool:
        """Whether no transfer and no step copies the job's blocks."""
        return job_number not in self._transfers and job_number not in self._readers

    def hand_over(self, job_number: int, heir: int, num_tokens: int) -> None:
        """Give held KV, of which ``num_tokens`` tokens are of use, to a job without KV. It must be
        idle.

        The heir keeps all blocks; those behind its tokens are room to grow.
        """
        assert self.is_idle(job_number), "held KV is being copied"
        self._held.remove(job_number)
        self.device.hand_over(job_number, heir)
        self.host.hand_over(job_number, heir)
        saved = self._saved.pop(job_number, 0)
        if saved:
            self._saved[heir] = min(saved, num_tokens)
        self._update_facts(job_number)
        self._update_facts(heir)
        if not self._incremental and self.device.num_held(heir):
            self.forget_host(heir)

    def take_over_read(self, job_number: int, owner: int, num_tokens: int) -> None:
        """Held KV that was on the disk alone is in the host blocks of ``owner`` now."""
        self.host.hand_over(owner, job_number)
        self._saved[job_number] = num_tokens
        self._update_facts(job_number)

    def leave_device(self, job_number: int) -> None:
        """Free the device blocks of held KV, which must be idle. The host keeps what it has."""
        self.device.release(job_number)
        self._update_facts(job_number)

    def forget_host(self, job_number: int) -> None:
        """Free the host's blocks of a job on the device, or of held KV, without a transfer."""
        self.host.release(job_number)
        self._saved.pop(job_number, None)
        self._update_facts(job_number)

    def release(self, job_number: int, keys: Sequence[bytes] = ()) -> None:
        """The job ended, or gives up its KV: free all its blocks.

        Blocks that a transfer or a step still copies are freed when that has ended.

        Args:
            keys: for ``BlockPool.release`` of the device blocks. After a transfer no content is
                kept.
        """
        self._held.remove(job_number)
        if job_number in self._transfers or job_number in self._readers:
            self._ended[job_number] = () if job_number in self._transfers else keys
            self._update_facts(job_number)
            return
        self.device.release(job_number, keys)
        self.forget_host(job_number)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block of each tier is in exactly one place, and the
        tables agree with the states of the jobs."""
        self.device.check_integrity()
        self.host.check_integrity()
        self.disk.check_integrity(self.device)
        for number, saved in self._saved.items():
            end = self.host.end(number)
            assert 0 < saved <= end * self._block_size, "the host lacks blocks of a saved prefix"
        for number, transfer in self._transfers.items():
            for pool, blocks in (
                (self.device, transfer.device_blocks),
                (self.host, transfer.host_blocks),
            ):
                assert set(blocks) <= set(pool.all_blocks(number)), "a transfer lost its blocks"
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
        away = {
            number
            for number in self._saved
            if not self.device.num_held(number) and number not in self._held
        }
        assert self._swapped_out == away, "swapped-out jobs"
        moving = {one.job_number for one in unfinished if one.kind is not TransferKind.WRITE_BACK}
        assert self.away == away | moving, "jobs that are away"
        copies = self._saved.keys() - away - self._transfers.keys() - self._ended.keys()
        copies.difference_update(self._held)
        assert self.num_copies == sum(map(self.host.num_held, copies)), "copies on the host"
        assert self.away.isdisjoint(self._held), "held KV is in a swap"
        self._held.check({number: self._count_held(number) for number in self._held})

    def _update_facts(self, job_number: int) -> None:
        """The job's KV has moved: update the sets and sums over all jobs."""
        num_copies = 0
        transfer = self._transfers.get(job_number)
        is_away = transfer is not None and transfer.kind is not TransferKind.WRITE_BACK
        self._swapped_out.discard(job_number)
        if job_number in self._saved and job_number not in self._held:
            if not self.device.num_held(job_number):
                self._swapped_out.add(job_number)
                is_away = True
            elif not (job_number in self._transfers or job_number in self._ended):
                num_copies = self.host.num_held(job_number)
        if is_away:
            self.away.add(job_number)
        else:
            self.away.discard(job_number)
        self.num_copies += num_copies - self._copies.pop(job_number, 0)
        if num_copies:
            self._copies[job_number] = num_copies
        self._update_held(job_number)

    def _update_held(self, job_number: int) -> None:
        if job_number in self._held:
            self._held.set_blocks(job_number, self._count_held(job_number))

    def _count_held(self, job_number: int) -> HeldBlocks:
        on_device = self.device.num_held(job_number)
        on_host = 0 if job_number in self._transfers else self.host.num_held(job_number)
        return HeldBlocks(
            on_device,
            on_device if self.is_idle(job_number) else 0,
            on_host,
            0 if on_device else on_host,
        )

    def _release_if_ended(self, job_number: int) -> None:
        is_used = job_number in self._transfers or job_number in self._readers
        if job_number in self._ended and not is_used:
            self.release(job_number, self._ended.pop(job_number))

    def _unsaved(self, saved: int, num_tokens: int, stop: int) -> list[range]:
        """For each kind of layers the blocks of a group, before block ``stop``, that a job of
        ``num_tokens`` tokens needs and of which the first ``saved`` tokens lack."""
        first = saved // self._block_size
        return [
            range(max(first, kind.first_seen(num_tokens, self._block_size)), stop)
            for kind in self.needs.kinds
        ]

    def _first_seen(self, num_tokens: int) -> int:
        """The first block of any group that a job of ``num_tokens`` tokens still needs."""
        return min(kind.first_seen(num_tokens, self._block_size) for kind in self.needs.kinds)

    def _trim_host(self, job_number: int, num_tokens: int) -> None:
        """Free the host's blocks that the job with ``num_tokens`` tokens does not see any more."""
        if self.has_windows and self.host.num_held(job_number):
            self.host.free_before(job_number, num_tokens)
            if not self.host.num_held(job_number):
                self._saved.pop(job_number, None)
            self._update_facts(job_number)

    def _start(
        self, kind: TransferKind, job_number: int, num_tokens: int, parts: Sequence[range]
    ) -> Transfer:
        """
        Args:
            parts: for each kind of layers the blocks of a group that are copied.
        """
        stop = self.device.blocks_for(num_tokens)
        device_blocks, host_blocks = array("i"), array("i")
        for all_but_last in (True, False):
            for index, part in enumerate(parts):
                split = max(part.start, stop - 1)
                copied = range(part.start, split) if all_but_last else range(split, part.stop)
                if copied:
                    device_blocks += self.device.blocks_at(job_number, index, copied)
                    host_blocks += self.host.blocks_at(job_number, index, copied)
        transfer = Transfer(
            id=next(self._ids),
            job_number=job_number,
            kind=kind,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            num_last=sum(
                groups.num_groups
                for groups, part in zip(self.needs.kinds, parts, strict=True)
                if part
            ),
            num_tokens=num_tokens,
        )
        self._transfers[job_number] = transfer
        self._num_of_kind[kind] += 1
        self.num_in_transfer += len(device_blocks)
        self._update_facts(job_number)
        return transfer
