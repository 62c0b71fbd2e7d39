"""Two tiers of blocks: no block is lost, owned twice, or reused during its copy."""

from __future__ import annotations

import pytest
from fastserve_backend.kv_cache.blocks import BlockPool, OutOfBlocksError
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import Transfer, TransferKind
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from matrices import random_examples

WINDOWED = (LayerKind(None, 1), LayerKind(6, 2))


def tiers(
    device: int = 8,
    host: int = 8,
    *,
    incremental: bool = True,
    kinds: tuple[LayerKind, ...] = ONE_GROUP,
) -> TwoTierKV:
    return TwoTierKV(device, host, 4, incremental=incremental, kinds=kinds)


def begun(transfer: Transfer | None) -> Transfer:
    assert transfer is not None
    return transfer


def test_a_job_leaves_and_returns() -> None:
    kv = tiers()
    kv.device.grow(1, 10)
    transfer = begun(kv.swap_out(1, 10))
    assert transfer.kind is TransferKind.SWAP_OUT
    assert (
        len(transfer.device_blocks),
        kv.transfers.blocks_of(TransferKind.SWAP_OUT),
        kv.may_run(1),
    ) == (3, 3, False)
    kv.finish(1, succeeded=True)
    assert (
        kv.device.num_held(1),
        kv.transfers.blocks_of(TransferKind.SWAP_OUT),
        kv.is_swapped_out(1),
    ) == (0, 0, True)
    assert not kv.may_run(1)
    transfer = begun(kv.swap_in(1, 13))
    assert transfer.kind is TransferKind.SWAP_IN
    assert (len(transfer.device_blocks), kv.device.num_held(1)) == (3, 4)  # room for 13 tokens
    assert not kv.may_run(1)
    kv.finish(1, succeeded=True)
    assert kv.may_run(1)
    assert kv.num_saved(1) == 10


def test_what_the_host_has_is_not_copied_again() -> None:
    kv = tiers()
    kv.device.grow(1, 10)
    kv.swap_out(1, 10)
    kv.finish(1, succeeded=True)
    kv.swap_in(1, 11)
    kv.finish(1, succeeded=True)
    # Unchanged: its device blocks are free at once.
    assert kv.num_to_copy(1, 10) == 0
    kv.device.grow(1, 13)
    assert kv.num_to_copy(1, 13) == 2  # the block that was partly full, and a new one
    transfer = begun(kv.swap_out(1, 13))
    assert list(transfer.device_blocks) == list(kv.device.table(1)[2:])
    assert list(transfer.host_blocks) == list(kv.host.table(1)[2:])


def test_a_swap_out_of_what_the_host_has_frees_the_device_at_once() -> None:
    kv = tiers()
    kv.device.grow(1, 8)
    kv.write_back(1, 8, max_blocks=5)
    assert kv.may_run(1)
    kv.finish(1, succeeded=True)
    assert kv.swap_out(1, 8) is None
    assert (kv.device.num_free, kv.is_swapped_out(1)) == (8, True)


def test_without_incremental_swaps_the_host_forgets_a_job_that_returned() -> None:
    kv = tiers(incremental=False)
    kv.device.grow(1, 8)
    kv.swap_out(1, 8)
    kv.finish(1, succeeded=True)
    kv.swap_in(1, 8)
    kv.finish(1, succeeded=True)
    assert (kv.host.num_free, kv.num_to_copy(1, 8)) == (8, 2)


def test_a_write_back_takes_full_blocks_only_and_goes_on_where_it_stopped() -> None:
    kv = tiers()
    kv.device.grow(1, 15)
    assert len(begun(kv.write_back(1, 15, max_blocks=2)).device_blocks) == 2
    kv.finish(1, succeeded=True)
    transfer = begun(kv.write_back(1, 15, max_blocks=2))
    assert list(transfer.device_blocks) == [kv.device.table(1)[2]]
    kv.finish(1, succeeded=True)
    assert kv.write_back(1, 15, max_blocks=2) is None
    assert kv.num_saved(1) == 12


def test_a_full_host_or_device_changes_nothing() -> None:
    kv = tiers(device=4, host=2)
    kv.device.grow(1, 12)
    with pytest.raises(OutOfBlocksError):
        kv.swap_out(1, 12)
    assert (kv.device.num_held(1), kv.host.num_free, len(kv.transfers)) == (3, 2, 0)
    kv.device.grow(2, 4)
    kv.swap_out(2, 4)
    kv.finish(2, succeeded=True)
    kv.device.grow(3, 4)
    with pytest.raises(OutOfBlocksError):
        kv.swap_in(2, 4)
    assert kv.is_swapped_out(2)
    kv.check_integrity()


def test_blocks_of_an_ended_job_are_free_when_its_copy_has_ended() -> None:
    kv = tiers()
    kv.device.grow(1, 8)
    kv.swap_out(1, 8)
    kv.release(1)
    assert (kv.device.num_free, kv.host.num_free) == (6, 6)
    kv.finish(1, succeeded=True)
    assert (kv.device.num_free, kv.host.num_free) == (8, 8)
    assert not kv.is_swapped_out(1)


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failed_swap_costs_the_job_its_kv(direction: str) -> None:
    kv = tiers()
    kv.device.grow(1, 8)
    kv.swap_out(1, 8)
    if direction == "in":
        kv.finish(1, succeeded=True)
        kv.swap_in(1, 8)
    kv.finish(1, succeeded=False)
    assert (kv.device.num_free, kv.host.num_free, kv.may_run(1)) == (8, 8, True)


def test_a_failed_write_back_costs_what_the_host_had() -> None:
    kv = tiers()
    kv.device.grow(1, 8)
    kv.write_back(1, 8, max_blocks=1)
    kv.finish(1, succeeded=True)
    kv.write_back(1, 8, max_blocks=1)
    kv.finish(1, succeeded=False)
    assert (kv.device.num_held(1), kv.host.num_free, kv.num_saved(1)) == (2, 8, 0)


def test_a_swapped_job_takes_only_the_blocks_along_that_its_next_token_sees() -> None:
    kv = tiers(24, 24, kinds=WINDOWED)
    kv.device.grow(1, 22)
    assert kv.device.num_held(1) == 6 * 3
    kv.free_before(1, 22)  # the token at 22 sees those from 17 on
    assert (kv.device.first(1, 0), kv.device.first(1, 1)) == (0, 4)
    assert kv.device.num_held(1) == 6 + 2 * 2
    transfer = begun(kv.swap_out(1, 22))
    assert (len(transfer.device_blocks), transfer.num_last) == (10, 3)
    assert list(transfer.device_blocks[-3:]) == [
        kv.device.table(1)[-1],
        *kv.device.table(1, 1)[-2:],
    ]
    kv.finish(1, succeeded=True)
    assert (kv.device.num_free, kv.host.num_held(1)) == (24, 10)
    transfer = begun(kv.swap_in(1, 23))
    assert (len(transfer.host_blocks), kv.device.first(1, 1)) == (10, 4)
    kv.finish(1, succeeded=True)
    kv.check_integrity()


def test_what_falls_behind_a_window_leaves_both_tiers() -> None:
    kv = tiers(24, 24, kinds=WINDOWED)
    kv.device.grow(1, 16)
    assert len(begun(kv.write_back(1, 16, max_blocks=100)).device_blocks) == 4 + 2 * 2
    kv.finish(1, succeeded=True)
    kv.device.grow(1, 20, 16)
    kv.free_before(1, 20)  # the token at 20 sees those from 15 on
    assert (kv.num_saved(1), kv.host.num_held(1)) == (16, 4 + 2 * 1)
    assert kv.num_to_copy(1, 20) == 1 + 2
    kv.device.grow(1, 40, 20)
    kv.free_before(1, 40)  # and now none that the host has
    assert (kv.num_saved(1), kv.host.num_held(1)) == (16, 4)
    assert kv.num_to_copy(1, 40) == 6 + 2 * 2
    begun(kv.swap_out(1, 40))
    kv.finish(1, succeeded=True)
    assert (kv.host.num_held(1), kv.num_saved(1)) == (10 + 2 * 2, 40)


def test_the_host_forgets_a_job_all_of_whose_saved_blocks_are_behind_the_window() -> None:
    kv = tiers(kinds=(LayerKind(6, 1),))
    kv.device.grow(1, 8)
    begun(kv.write_back(1, 8, max_blocks=2))
    kv.finish(1, succeeded=True)
    kv.device.grow(1, 24, 8)
    kv.free_before(1, 24)
    assert (kv.num_saved(1), kv.host.num_free, kv.has_copy(1)) == (0, 8, False)
    assert len(begun(kv.write_back(1, 24, max_blocks=1)).device_blocks) == 1  # not of its start
    kv.finish(1, succeeded=True)
    assert len(begun(kv.swap_out(1, 24)).device_blocks) == 1


JOBS = st.integers(0, 7)


class Histories(RuleBasedStateMachine):
    """Random operations in any order, with a model of the blocks' contents.

    The model's blocks hold (job, group, index of the block, tokens in it). A copy takes effect when
    it ends, with its source's contents at that moment. So contents would mix if a block were reused
    too early.
    """

    @initialize(
        device=st.integers(4, 12),
        host=st.integers(0, 16),
        incremental=st.booleans(),
        kinds=st.sampled_from(
            [
                ONE_GROUP,
                (LayerKind(5, 1),),
                WINDOWED,
                (*ONE_GROUP, LayerKind(2, 1), LayerKind(9, 1)),
            ]
        ),
    )
    def start(
        self, device: int, host: int, incremental: bool, kinds: tuple[LayerKind, ...]
    ) -> None:
        num_groups = sum(kind.num_groups for kind in kinds)
        self.kv = tiers(
            device * num_groups, host * num_groups, incremental=incremental, kinds=kinds
        )
        self.tokens: dict[int, int] = {}  # live jobs with KV → computed tokens
        self.device: dict[int, tuple[int, int, int, int]] = {}
        self.host: dict[int, tuple[int, int, int, int]] = {}
        self.running: dict[int, Transfer] = {}
        self.next_job = 0

    @rule()
    def arrive(self) -> None:
        self._run(self.next_job, 3)
        self.next_job += 1

    @precondition(lambda self: self.tokens)
    @rule(pick=JOBS, count=st.integers(1, 9))
    def run(self, pick: int, count: int) -> None:
        self._run(self._pick(pick), count)

    def _run(self, job: int, count: int) -> None:
        """An iteration of ``count`` tokens, if the job may run and there is room."""
        before, device = self.tokens.get(job, 0), self.kv.device
        total = before + count
        if not self.kv.may_run(job) or device.missing(job, total, before) > device.num_free:
            return
        device.grow(job, total, before)
        for (group, index), block in self._blocks(device, job, before).items():
            if index < device.blocks_for(before):
                filled = min(4, before - 4 * index)
                assert self.device[block] == (job, group, index, filled)  # it attends to these
            self.device[block] = (job, group, index, min(4, total - 4 * index))
        self.tokens[job] = total

    def _blocks(self, pool: BlockPool, job: int, position: int) -> dict[tuple[int, int], int]:
        """The job's blocks by group and index, those that the token at ``position`` sees and all
        behind them."""
        blocks, num_groups = {}, 0
        for number, kind in enumerate(self.kv.needs.kinds):
            first, seen = pool.first(job, number), kind.first_seen(position, 4)
            assert first <= seen, "a block that it sees is gone"
            for entry, block in enumerate(pool.table(job, number)):
                index = first + entry // kind.num_groups
                if index >= seen:
                    blocks[num_groups + entry % kind.num_groups, index] = block
            num_groups += kind.num_groups
        return blocks

    @precondition(lambda self: self.tokens)
    @rule(pick=JOBS)
    def free_what_is_behind_the_windows(self, pick: int) -> None:
        job = self._pick(pick)
        if self.kv.transfers.of(job) is None and self.kv.device.num_held(job):
            self.kv.free_before(job, self.tokens[job])
            assert self.kv.device.num_held(job) >= self.kv.needs.computed(self.tokens[job])

    @precondition(lambda self: self.tokens)
    @rule(pick=JOBS)
    def swap_out(self, pick: int) -> None:
        job = self._pick(pick)
        if self.kv.transfers.of(job) is None and not self.kv.is_swapped_out(job):
            try:
                self._note(self.kv.swap_out(job, self.tokens[job]))
            except OutOfBlocksError:
                assert self.kv.device.num_held(job) > 0

    @precondition(lambda self: self.tokens)
    @rule(pick=JOBS, max_blocks=st.integers(1, 3))
    def write_back(self, pick: int, max_blocks: int) -> None:
        job = self._pick(pick)
        if self.kv.transfers.of(job) is None and not self.kv.is_swapped_out(job):
            try:
                self._note(self.kv.write_back(job, self.tokens[job], max_blocks))
            except OutOfBlocksError:
                assert self.kv.transfers.of(job) is None

    @precondition(lambda self: self.tokens)
    @rule(pick=JOBS, room=st.integers(0, 5))
    def swap_in(self, pick: int, room: int) -> None:
        job = self._pick(pick)
        if self.kv.is_swapped_out(job) and self.kv.transfers.of(job) is None:
            try:
                self._note(self.kv.swap_in(job, self.tokens[job] + room))
            except OutOfBlocksError:
                assert self.kv.is_swapped_out(job)

    def _note(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            assert transfer.job_number not in self.running
            self.running[transfer.job_number] = transfer

    @precondition(lambda self: self.running)
    @rule(pick=JOBS, succeeded=st.sampled_from([True, True, True, False]))
    def end_a_copy(self, pick: int, succeeded: bool) -> None:
        job = list(self.running)[pick % len(self.running)]
        transfer = self.running.pop(job)
        if succeeded:
            source, target = self.device, self.host
            pairs = zip(transfer.device_blocks, transfer.host_blocks, strict=True)
            if transfer.kind is TransferKind.SWAP_IN:
                source, target = target, source
                pairs = zip(transfer.host_blocks, transfer.device_blocks, strict=True)
            for from_block, to_block in pairs:
                assert source[from_block][0] == job, "its source was reused"
                target[to_block] = source[from_block]
        self.kv.finish(job, succeeded=succeeded)
        if not succeeded and transfer.kind is not TransferKind.WRITE_BACK:
            self.tokens.pop(job, None)

    @precondition(lambda self: self.tokens)
    @rule(pick=JOBS)
    def forget(self, pick: int) -> None:
        job = self._pick(pick)
        if self.kv.transfers.of(job) is None and self.kv.device.num_held(job):
            self.kv.forget_host(job)

    @precondition(lambda self: self.tokens)
    @rule(pick=JOBS)
    def finish_or_cancel(self, pick: int) -> None:
        job = self._pick(pick)
        del self.tokens[job]
        self.kv.release(job)

    def _pick(self, pick: int) -> int:
        return list(self.tokens)[pick % len(self.tokens)]

    @invariant()
    def blocks_are_in_one_place(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            for job, tokens in self.tokens.items():
                if self.kv.may_run(job):
                    assert self.kv.device.num_held(job) >= self.kv.needs.computed(tokens)
                if self.kv.is_swapped_out(job) and job not in self.running:
                    assert self.kv.host.num_held(job) == self.kv.needs.computed(tokens)
                    for place, block in self._blocks(self.kv.host, job, tokens).items():
                        assert self.host[block][:3] == (job, *place)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for job in list(self.tokens):
                self.kv.release(job)
            for job in list(self.running):
                self.kv.finish(job, succeeded=True)
            self.kv.check_integrity()
            assert self.kv.device.num_used == self.kv.host.num_used == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(random_examples(300), stateful_step_count=50)
