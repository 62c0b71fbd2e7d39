"""Block tables: no block is lost or owned twice, whatever happens."""

from __future__ import annotations

from itertools import takewhile

import pytest
from fastserve_backend.kv_cache.blocks import BlockPool, OutOfBlocksError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from matrices import random_examples


def test_a_table_grows_by_whole_blocks() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.grow(1, 16)
    assert pool.num_held(1) == 1
    pool.grow(1, 17)
    assert pool.num_held(1) == 2
    pool.grow(1, 5)
    assert pool.num_held(1) == 2
    assert len(set(pool.table(1))) == 2
    assert pool.num_free == 2


def test_growing_beyond_the_pool_changes_nothing() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    pool.grow(1, 20)
    with pytest.raises(OutOfBlocksError, match="job 2 needs 1 of 0 free blocks"):
        pool.grow(2, 1)
    assert pool.num_held(2) == 0
    pool.check_integrity()


def test_releasing_a_job_without_blocks_is_fine() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    pool.release(5)
    assert pool.num_free == 2


def test_integrity_check_sees_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(num_blocks=3, block_size=16)
    pool.grow(1, 16)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost or owned twice"):
        pool.check_integrity()
    pool._free.append(pool.table(1)[0])
    with pytest.raises(AssertionError, match="lost or owned twice"):
        pool.check_integrity()


def take_kept(pool: BlockPool, job: int, keys: list[bytes]) -> int:
    """Gives the job the kept blocks with these keys up to the first that is missing; how many."""
    count = sum(1 for _ in takewhile(pool.is_kept, keys))
    pool.take_kept(job, keys, [range(count)])
    return count


KEYS = [bytes([number]) for number in range(20)]


class PoolMachine(RuleBasedStateMachine):
    """Grows, releases and recalls jobs at random beside a model that only counts."""

    @initialize(num_blocks=st.integers(1, 40), block_size=st.sampled_from([1, 4, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tokens: dict[int, int] = {}

    @rule(job=st.integers(0, 8), tokens=st.integers(1, 200))
    def grow(self, job: int, tokens: int) -> None:
        before = list(self.pool.table(job)) if self.pool.num_held(job) else []
        fits = self.pool.missing(job, tokens) <= self.pool.num_free
        try:
            self.pool.grow(job, tokens)
        except OutOfBlocksError:
            assert not fits
            assert self.pool.num_held(job) == len(before)
        else:
            assert fits
            self.tokens[job] = max(tokens, self.tokens.get(job, 0))
            assert list(self.pool.table(job))[: len(before)] == before

    @rule(job=st.integers(0, 8), kept=st.integers(0, 20))
    def release(self, job: int, kept: int) -> None:
        """Keeps some blocks. They differ only in which beginning of the same text they hold."""
        num_free, held = self.pool.num_free, self.pool.num_held(job)
        self.pool.release(job, KEYS[: min(kept, held)])
        assert self.pool.num_free == num_free + held
        self.tokens.pop(job, None)

    @rule(job=st.integers(0, 8), wanted=st.integers(0, 20))
    def take_kept(self, job: int, wanted: int) -> None:
        if self.pool.num_held(job) == 0:
            num_free = self.pool.num_free
            count = take_kept(self.pool, job, KEYS[:wanted])
            assert count == self.pool.num_held(job) == num_free - self.pool.num_free <= wanted
            if count:
                self.tokens[job] = count * self.pool.block_size

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        for job, tokens in self.tokens.items():
            assert self.pool.num_held(job) == self.pool.blocks_for(tokens)
        assert self.pool.num_used == sum(map(self.pool.blocks_for, self.tokens.values()))

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for job in list(self.tokens):
                self.pool.release(job)
            assert self.pool.num_free == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(random_examples(150), stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
