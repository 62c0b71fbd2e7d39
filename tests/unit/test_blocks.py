"""Block tables: no block is lost, and none is free while a job has it, whatever happens."""

from __future__ import annotations

from itertools import takewhile

import pytest
from fastserve_backend.kv_cache.blocks import BlockPool, OutOfBlocksError
from fastserve_backend.kv_cache.freed_blocks import FreedBlocks
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


KEYS = [bytes([number]) for number in range(20)]


def prefix_of(pool: BlockPool, keys: list[bytes]) -> int:
    """How many blocks from the first on are published."""
    return sum(1 for _ in takewhile(pool.has, keys))


def test_a_job_refers_to_published_blocks_of_another() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.grow(1, 12)
    pool.publish(1, KEYS[:2])
    pool.refer_to(2, KEYS, [range(2)])
    pool.grow(2, 16)
    assert pool.table(2)[:2] == pool.table(1)[:2]
    assert set(pool.table(2)[2:]).isdisjoint(pool.table(1))
    assert (pool.num_used, pool.num_shared, pool.num_alone(1), pool.num_alone(2)) == (5, 2, 1, 2)
    pool.release(1)
    assert (pool.num_used, pool.num_shared, pool.num_alone(2)) == (4, 0, 4)
    pool.check_integrity()


def test_what_nobody_has_any_more_is_found_until_its_block_is_needed() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    pool.grow(1, 16)
    table = list(pool.table(1))
    pool.publish(1, KEYS[:3])
    pool.release(1)
    assert (pool.num_free, pool.num_used, pool.num_cached(KEYS, [range(3)])) == (6, 0, 3)
    pool.grow(2, 16)  # the three blocks without content, and the last of the cached ones
    assert table[2] in pool.table(2)
    assert set(table[:2]).isdisjoint(pool.table(2))
    assert [pool.has(key) for key in KEYS[:3]] == [True, True, False]
    pool.refer_to(3, KEYS, [range(2)])
    assert list(pool.table(3)) == table[:2]
    assert (pool.num_cached(KEYS, [range(2)]), prefix_of(pool, KEYS)) == (0, 2)
    pool.refer_to(4, KEYS, [range(0)])
    assert pool.num_held(4) == 0
    pool.check_integrity()


def test_of_equal_content_the_first_block_is_found() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    for job in (1, 2):
        pool.grow(job, 4)
        pool.publish(job, KEYS[:1])
    pool.release(2)
    pool.refer_to(3, KEYS, [range(1)])
    assert pool.table(3) == pool.table(1)
    pool.check_integrity()


def test_nobody_finds_what_was_withdrawn() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool.grow(1, 8)
    pool.publish(1, KEYS[:2])
    pool.withdraw(1)
    assert prefix_of(pool, KEYS) == 0
    pool.release(1)
    assert prefix_of(pool, KEYS) == 0
    pool.check_integrity()


def test_an_heir_writes_to_no_block_that_others_find() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.grow(1, 16)
    pool.publish(1, KEYS[:4])
    pool.cut_off(1, 6)
    assert (pool.num_held(1), [pool.has(key) for key in KEYS[:4]]) == (2, [True, False, True, True])
    pool.check_integrity()


def test_a_block_is_free_when_all_who_have_it_leave() -> None:
    pool = BlockPool(num_blocks=12, block_size=4)
    pool.grow(1, 12)
    pool.publish(1, KEYS[:2])
    for job in (2, 3):
        pool.refer_to(job, KEYS, [range(2)])
        pool.grow(job, 12)
    freed, leaving = FreedBlocks(pool), pool.job_set()
    counts = []
    for job in (1, 2, 3):
        counts.append(freed.add(job))
        pool.set_member(leaving, job, True)
        assert leaving.num_alone == sum(counts)
    assert counts == [1, 1, 1 + 2]
    pool.refer_to(4, KEYS, [range(1)])
    assert leaving.num_alone == 4
    pool.release(4)
    pool.release(1)
    assert leaving.num_alone == 4
    pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Jobs come, share, grow and leave at random beside a model of the blocks' contents. All tell
    the same text, and differ only in how much of it they have."""

    @initialize(num_blocks=st.integers(1, 40), block_size=st.sampled_from([1, 4, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.sets = [self.pool.job_set(), self.pool.job_set()]
        self.tokens: dict[int, int] = {}
        self.content: dict[int, bytes] = {}  # by block

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
            self._note(job, tokens, before)

    @rule(job=st.integers(0, 8), tokens=st.integers(1, 200))
    def grow_from_what_is_published(self, job: int, tokens: int) -> None:
        before = list(self.pool.table(job)) if self.pool.num_held(job) else []
        needed, num_new = self.pool.missing_but_for(job, tokens, 0, KEYS)
        try:
            new = self.pool.grow_from(job, tokens, 0, KEYS)
        except OutOfBlocksError:
            assert needed > self.pool.num_free
            assert self.pool.num_held(job) == len(before)
        else:
            assert len(new[0]) == num_new
            table = self.pool.table(job)
            for place in range(len(before), len(table)):
                assert place in new[0] or self.content[table[place]] == KEYS[place]
            self._note(job, tokens, before)

    def _note(self, job: int, tokens: int, before: list[int]) -> None:
        self.tokens[job] = max(tokens, self.tokens.get(job, 0))
        table = list(self.pool.table(job))
        assert table[: len(before)] == before
        self.content.update(zip(table, KEYS, strict=False))

    @rule(job=st.integers(0, 8), count=st.integers(0, 20))
    def publish(self, job: int, count: int) -> None:
        self.pool.publish(job, KEYS[: min(count, self.pool.num_held(job))])

    @rule(job=st.integers(0, 8))
    def withdraw(self, job: int) -> None:
        self.pool.withdraw(job)

    @rule(job=st.integers(0, 8))
    def release(self, job: int) -> None:
        num_free, num_alone = self.pool.num_free, self.pool.num_alone(job)
        self.pool.release(job)
        assert self.pool.num_free == num_free + num_alone
        self.tokens.pop(job, None)

    @rule(job=st.integers(0, 8), wanted=st.integers(0, 20))
    def refer(self, job: int, wanted: int) -> None:
        if self.pool.num_held(job) == 0:
            num_free, count = self.pool.num_free, prefix_of(self.pool, KEYS[:wanted])
            num_cached = self.pool.num_cached(KEYS, [range(count)])
            self.pool.refer_to(job, KEYS, [range(count)])
            assert count == self.pool.num_held(job)
            assert num_free - self.pool.num_free == num_cached
            if count:
                self.tokens[job] = count * self.pool.block_size
                assert [self.content[block] for block in self.pool.table(job)] == KEYS[:count]

    @rule(job=st.integers(0, 8), number=st.integers(0, 1), is_member=st.booleans())
    def join_or_leave(self, job: int, number: int, is_member: bool) -> None:
        self.pool.set_member(self.sets[number], job, is_member)

    @invariant()
    def the_counts_are_those_of_the_tables(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        for job, tokens in self.tokens.items():
            assert self.pool.num_held(job) == self.pool.blocks_for(tokens)
        used = {block for job in self.tokens for block in self.pool.table(job)}
        assert self.pool.num_used == len(used)
        for jobs in self.sets:
            freed = FreedBlocks(self.pool)
            assert jobs.num_alone == sum(map(freed.add, jobs))

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for job in list(self.tokens):
                self.pool.release(job)
            assert self.pool.num_free == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(random_examples(150), stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
