"""KV in two tiers: which blocks of a job are on the device, on the host, or in a transfer.

Only block numbers are kept here; the ranks copy. The host holds a prefix of a job's KV. A full
block never changes, so its copy stays valid while the job runs on. When the job is swapped out
again, only later blocks are copied. What is on the other side already, of whatever job, is not
copied: the job refers to it. For layers with a window, both tiers have only the blocks that the
job's next tokens see.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.disk_tier import DiskTier
from fastserve_backend.kv_cache.freed_blocks import FreedBlocks
from fastserve_backend.kv_cache.held_blocks import HeldKV
from fastserve_backend.kv_cache.transfers import Transfer, TransferKind, UnfinishedTransfers
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind


class TwoTierKV:
    """Owns the block tables of both tiers and the unfinished transfers between them.

    A job is in one of three states, and may run in the first two:

    * without KV;
    * on the device, perhaps with a prefix on the host, perhaps with an unfinished write-back;
    * away: swapped out, or in a swap in either direction.

    The blocks of an unfinished transfer stay in the job's tables until the transfer ends, even if
    the job ends earlier. So they are not used for anything else (invariant 1 of
    docs/architecture.md).

    KV of an ended job may be *held* until another job gets it. It is in neither of these states.

    Args:
        incremental: keep the host's blocks when the job returns to the device, and let others
            refer to them.
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
        self.transfers = UnfinishedTransfers()
        """Only the tiers add and remove them."""
        self._ended: set[int] = set()  # jobs that ended during a transfer
        self._ids = itertools.count()
        self.disk = DiskTier(self.host, num_disk_blocks, self._ids)
        # Every decision needs these facts about all jobs, so each change of a job updates them.
        self._swapped_out: set[int] = set()
        self.away: set[int] = set()
        """Jobs that may not run: swapped out, or in a swap."""
        self.held = HeldKV(self.device, self.host)
        self.leaving = self.device.job_set()
        """Jobs that leave the device without any decision: they are in an unfinished swap-out, or
        held."""
        self.copies = self.host.job_set()
        """Jobs of ``has_copy``."""

    @property
    def num_copies(self) -> int:
        """Host blocks that only jobs of ``has_copy`` have."""
        return self.copies.num_alone

    @property
    def longest_job(self) -> int:
        """Tokens of the longest job that the device holds alone."""
        return self.needs.longest_job(self.device.num_blocks)

    @property
    def num_swapped_out(self) -> int:
        """Jobs whose KV is only on the host."""
        return len(self._swapped_out)

    @property
    def num_of_ended(self) -> int:
        """Device blocks that ended jobs still have, and no others but held ones."""
        return sum(map(FreedBlocks(self.device, self.held.jobs).add, self._ended))

    @property
    def ended_not_leaving(self) -> list[int]:
        """Jobs that have ended, and whose device blocks no swap-out frees."""
        return [
            number
            for number in self._ended
            if (transfer := self.transfers.of(number))
            and transfer.kind is not TransferKind.SWAP_OUT
        ]

    def num_saved(self, job_number: int) -> int:
        """How many of the job's first tokens have valid KV on the host."""
        return self._saved.get(job_number, 0)

    def has_copy(self, job_number: int) -> bool:
        """Whether all the job's KV is on the device, a part also on the host, and none moves."""
        return job_number in self.copies

    def is_swapped_out(self, job_number: int) -> bool:
        """Whether the job's KV is only on the host, without a transfer."""
        return job_number in self._swapped_out

    def may_run(self, job_number: int) -> bool:
        """Whether all the job's KV, if it has any, is on the device and stays there."""
        return job_number not in self.away

    def num_to_copy(self, job_number: int, num_tokens: int, keys: Sequence[bytes] = ()) -> int:
        """Blocks that a swap-out of the job with ``num_tokens`` tokens would copy.

        Args:
            keys: as for ``swap_out``.
        """
        saved = self.num_saved(job_number)
        if saved == num_tokens:
            return 0
        keys = self._host_keys(keys)
        _, num_new = self.host.missing_but_for(job_number, num_tokens, num_tokens, keys)
        return num_new + sum(map(len, self._partly_saved(job_number, num_tokens, num_tokens)))

    def missing_on_host(self, job_number: int, num_tokens: int, keys: Sequence[bytes] = ()) -> int:
        """Free host blocks that a swap-out of the job with ``num_tokens`` tokens would take.

        Args:
            keys: as for ``swap_out``.
        """
        keys = self._host_keys(keys)
        return self.host.missing_but_for(job_number, num_tokens, num_tokens, keys)[0]

    def free_before(self, job_number: int, position: int) -> None:
        """Give up the blocks, in both tiers, that no token of the job from ``position`` on sees.

        The job must be on the device, without a transfer, and all its steps before ``position``
        must have ended.
        """
        self.device.free_before(job_number, position)
        self._trim_host(job_number, position)
        self._update_facts(job_number)

    def swap_out(
        self, job_number: int, num_tokens: int, keys: Sequence[bytes] = ()
    ) -> Transfer | None:
        """Move the job's KV of ``num_tokens`` tokens to the host.

        The job must be on the device, without a transfer. None: the host already has all of it, so
        the job has left the device at once.

        Args:
            keys: of the job's first blocks of a group, as far as their KV is exact.

        Raises:
            OutOfBlocksError: the host has no room; nothing has changed.
        """
        new = self._add_on_host(job_number, num_tokens, num_tokens, keys)
        if any(new):
            return self._start(TransferKind.SWAP_OUT, job_number, num_tokens, new, keys)
        self._saved[job_number] = num_tokens
        self.device.release(job_number)
        self._update_facts(job_number)
        return None

    def write_back(
        self, job_number: int, num_tokens: int, max_blocks: int, keys: Sequence[bytes] = ()
    ) -> Transfer | None:
        """Copy the job's first full blocks that the host lacks; of held KV also a last block that
        is not full. None: there is nothing to copy.

        The job must be on the device, without a transfer.

        Args:
            num_tokens: tokens whose KV the job has.
            max_blocks: copy so many at most.
            keys: as for ``swap_out``.

        Raises:
            OutOfBlocksError: the host has no room; nothing has changed.
        """
        self._trim_host(job_number, num_tokens)
        saved = self.num_saved(job_number)
        first = max(saved // self._block_size, self._first_seen(num_tokens))
        end = self.device.num_full_blocks(num_tokens)
        if job_number in self.held and saved < num_tokens:
            end = self.device.blocks_for(num_tokens)
        stop = min(first + max_blocks // self.needs.num_groups, end)
        num_saved = min(num_tokens, stop * self._block_size)
        if num_saved <= saved:
            return None
        new = self._add_on_host(job_number, num_saved, num_tokens, keys)
        if any(new):
            return self._start(TransferKind.WRITE_BACK, job_number, num_saved, new, keys)
        self._saved[job_number] = num_saved
        self._update_facts(job_number)
        return None

    def swap_in(
        self, job_number: int, room_for: int, keys: Sequence[bytes] = ()
    ) -> Transfer | None:
        """Move the swapped-out job to the device, with blocks for ``room_for`` tokens. None: the
        device already has all of its KV, so the job is there at once.

        Args:
            keys: of the job's first blocks of a group, as far as it may have the KV of others.

        Raises:
            OutOfBlocksError: the device has no room; nothing has changed.
        """
        num_tokens = self._saved[job_number]
        new = self.device.grow_from(job_number, max(room_for, num_tokens), num_tokens, keys)
        end = self.device.blocks_for(num_tokens)  # behind it is room to grow
        copied = [
            places[: max(0, end * kind.num_groups - places.start)]
            for places, kind in zip(new, self.needs.kinds, strict=True)
        ]
        if any(copied):
            return self._start(TransferKind.SWAP_IN, job_number, num_tokens, copied)
        if not self._incremental:
            self.forget_host(job_number)
        self._update_facts(job_number)
        return None

    def refer_on_host(self, job_number: int, keys: Sequence[bytes], parts: Sequence[range]) -> None:
        """A job without KV has the KV of its first tokens on the host from now on, which others
        brought there. It is swapped out.

        Args:
            keys, parts: as for ``BlockPool.refer_to``.
        """
        self.host.refer_to(job_number, keys, parts)
        self._saved[job_number] = len(keys) * self._block_size
        self._update_facts(job_number)

    def missing_to_return(self, job_number: int, room_for: int, keys: Sequence[bytes]) -> int:
        """Free device blocks that ``swap_in`` takes."""
        return self.device.missing_but_for(job_number, room_for, self._saved[job_number], keys)[0]

    def finish(self, job_number: int, *, succeeded: bool) -> None:
        """The job's transfer has ended. If a swap failed, the job loses its KV in both tiers; if a
        write-back failed, only the host's part."""
        transfer = self.transfers.pop(job_number)
        if job_number in self._ended:
            self._ended.discard(job_number)
            self.release(job_number)
        elif not succeeded and transfer.kind is TransferKind.WRITE_BACK:
            self.forget_host(job_number)
        elif not succeeded:
            # Else others would try to copy the same blocks, again and again.
            self.host.withdraw(job_number)
            self.release(job_number)
        elif transfer.kind is TransferKind.SWAP_IN:
            if not self._incremental:
                self.forget_host(job_number)
        else:
            self._saved[job_number] = transfer.num_tokens
            num_full = self.host.num_full_blocks(transfer.num_tokens)
            self.host.publish(job_number, self._host_keys(transfer.keys)[:num_full])
            if transfer.kind is TransferKind.SWAP_OUT:
                self.device.release(job_number)
        self._update_facts(job_number)

    def hold(self, job_number: int) -> None:
        """The job ended. Its KV stays where it is until ``hand_over`` or ``release``. It must not
        be in a swap."""
        self.held.update(job_number, is_held=True)
        self._update_facts(job_number)

    def is_idle(self, job_number: int) -> bool:
        """Whether no transfer copies the job's blocks."""
        return self.transfers.of(job_number) is None

    def num_of_use(self, job_number: int, num_tokens: int) -> int:
        """Of how many of these first tokens of held KV a heir can use it. It writes behind them, so
        it must not share a block that is not full then."""
        pool = self.device if self.device.num_held(job_number) else self.host
        num_full = pool.num_full_blocks(num_tokens)
        if num_tokens % self._block_size and pool.is_shared_at(job_number, num_full):
            return num_full * self._block_size
        return num_tokens

    def hand_over(self, job_number: int, heir: int, num_tokens: int) -> None:
        """Give held KV of so many tokens, which are ``num_of_use``, to a job without KV. It must be
        idle."""
        assert self.is_idle(job_number), "held KV is being copied"
        saved = self._saved.pop(job_number, 0)
        if saved > num_tokens and self.device.num_held(job_number):
            saved = self.host.num_full_blocks(num_tokens) * self._block_size
        saved = min(saved, num_tokens)
        self.device.cut_off(job_number, num_tokens)
        self.host.cut_off(job_number, saved)
        self._hold_no_longer(job_number)
        self.device.hand_over(job_number, heir)
        self.host.hand_over(job_number, heir)
        if saved:
            self._saved[heir] = saved
        self._update_facts(job_number)
        self._update_facts(heir)
        if not self._incremental and self.device.num_held(heir):
            self.forget_host(heir)

    def take_over_read(self, job_number: int, owner: int, num_tokens: int) -> None:
        """Held KV that was on the disk alone is in the host blocks of ``owner`` now."""
        self.held.update(job_number, is_held=False)
        self.host.hand_over(owner, job_number)
        self.held.update(job_number, is_held=True)
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

    def release(self, job_number: int) -> None:
        """The job ended, or gives up its KV: it gives up all its blocks.

        Blocks that a transfer still copies stay in its tables until that has ended.
        """
        self._hold_no_longer(job_number)
        if self.transfers.of(job_number) is not None:
            self._ended.add(job_number)
            self._update_facts(job_number)
            return
        self.device.release(job_number)
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
        for transfer in self.transfers:
            for pool, blocks in (
                (self.device, transfer.device_blocks),
                (self.host, transfer.host_blocks),
            ):
                here = pool.all_blocks(transfer.job_number).tolist()
                lost = set(blocks).difference(here)
                assert not lost, "a transfer lost its blocks"
        self._check_sets()

    def _check_sets(self) -> None:
        self.transfers.check_integrity()
        in_transfer = {one.job_number: one.kind for one in self.transfers}
        assert self._ended <= in_transfer.keys(), "an ended job was forgotten"
        leaving = {number for number, kind in in_transfer.items() if kind is TransferKind.SWAP_OUT}
        assert set(self.leaving) == leaving.union(self.held), "jobs that leave"
        away = {
            number
            for number in self._saved
            if not self.device.num_held(number) and number not in self.held
        }
        assert self._swapped_out == away, "swapped-out jobs"
        moving = {
            number for number, kind in in_transfer.items() if kind is not TransferKind.WRITE_BACK
        }
        assert self.away == away | moving, "jobs that are away"
        copies = self._saved.keys() - away - in_transfer.keys()
        assert set(self.copies) == copies.difference(self.held), "copies on the host"
        assert self.away.isdisjoint(self.held), "held KV is in a swap"

    def _update_facts(self, job_number: int) -> None:
        """The job's KV has moved: update the sets of jobs."""
        transfer = self.transfers.of(job_number)
        is_away = transfer is not None and transfer.kind is not TransferKind.WRITE_BACK
        is_held = job_number in self.held
        has_copy = False
        self._swapped_out.discard(job_number)
        if job_number in self._saved and not is_held:
            if not self.device.num_held(job_number):
                self._swapped_out.add(job_number)
                is_away = True
            else:
                has_copy = transfer is None and job_number not in self._ended
        if is_away:
            self.away.add(job_number)
        else:
            self.away.discard(job_number)
        is_leaving = transfer is not None and transfer.kind is TransferKind.SWAP_OUT
        self.device.set_member(self.leaving, job_number, is_leaving or is_held)
        self.host.set_member(self.copies, job_number, has_copy)
        if is_held:
            self.held.update(job_number, is_held=True, is_idle=transfer is None)

    def _hold_no_longer(self, job_number: int) -> None:
        self.held.update(job_number, is_held=False)
        self.device.set_member(self.leaving, job_number, False)

    def _host_keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys if self._incremental else ()

    def _add_on_host(
        self, job_number: int, num_tokens: int, first_token: int, keys: Sequence[bytes]
    ) -> list[Sequence[int]]:
        """Give the job host blocks for its first ``num_tokens`` tokens, as far as ``first_token``
        sees them. Returns the places to copy for each kind, as in ``BlockPool.grow_from``."""
        self._trim_host(job_number, first_token)
        partly = self._partly_saved(job_number, num_tokens, first_token)
        keys = self._host_keys(keys)
        new = self.host.grow_from(job_number, num_tokens, first_token, keys)
        if not any(partly):
            return list(new)
        return [[*one, *places] for one, places in zip(partly, new, strict=True)]

    def _partly_saved(self, job_number: int, num_tokens: int, first_token: int) -> list[range]:
        """For each kind the places of the block of which the host has a part, if more of it is to
        be saved and ``first_token`` sees it."""
        saved = self.num_saved(job_number)
        if saved >= num_tokens or saved % self._block_size == 0:
            return [range(0)] * len(self.needs.kinds)
        block = saved // self._block_size
        return [
            range(block * kind.num_groups, (block + 1) * kind.num_groups)
            if kind.first_seen(first_token, self._block_size) <= block
            else range(0)
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
        self,
        kind: TransferKind,
        job_number: int,
        num_tokens: int,
        places: Sequence[Sequence[int]],
        keys: Sequence[bytes] = (),
    ) -> Transfer:
        """
        Args:
            places: for each kind of layers what is copied, as in ``BlockPool.grow_from``.
        """
        last = self.device.blocks_for(num_tokens) - 1
        both = array("i"), array("i")
        of_last = array("i"), array("i")
        for index, of_kind in enumerate(places):
            num_before = bisect_left(of_kind, last * self.needs.kinds[index].num_groups)
            for pool, blocks, others in zip((self.device, self.host), both, of_last, strict=True):
                copied = pool.blocks_at(job_number, index, of_kind)
                blocks.extend(copied[:num_before])
                others.extend(copied[num_before:])
        device_blocks, host_blocks = (
            blocks + others for blocks, others in zip(both, of_last, strict=True)
        )
        transfer = Transfer(
            id=next(self._ids),
            job_number=job_number,
            kind=kind,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            num_last=len(of_last[0]),
            num_tokens=num_tokens,
            keys=keys,
        )
        self.transfers.add(transfer)
        self._update_facts(job_number)
        return transfer
