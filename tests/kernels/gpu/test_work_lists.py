from __future__ import annotations

import numpy as np
import pytest
from fastserve_kernels.gpu.work_lists import (
    SPLIT_TOKENS,
    decode_capacity,
    decode_work,
    num_splits,
    prefill_capacity,
    prefill_work,
)
from numpy.typing import NDArray


def test_decode_work_covers_each_context_once_longest_splits_first() -> None:
    contexts = [1, 0, SPLIT_TOKENS, SPLIT_TOKENS + 1, 0, 2048]
    work = decode_work(contexts, capacity=15)
    assert work.dtype == np.int32
    assert work[0] == 12
    assert work[1:7].tolist() == [0, 1, 1, 2, 4, 4]
    items = work[7:].reshape(15, 2).tolist()
    assert items[:10] == [[2, 0], [3, 0], *([5, split] for split in range(8))]
    assert items[10:12] == [[0, 0], [3, 1]]
    assert items[12:] == [[0, 0]] * 3


@pytest.mark.parametrize("programs", [7, 64, 66])
def test_programs_that_take_every_nth_item_have_even_shares(programs: int) -> None:
    contexts = [SPLIT_TOKENS + 10 * row for row in range(100)]
    work = decode_work(contexts, capacity=int(num_splits(contexts).sum()))
    items = work[101:].reshape(-1, 2)
    tokens = np.minimum(np.array(contexts)[items[:, 0]] - SPLIT_TOKENS * items[:, 1], SPLIT_TOKENS)
    assert tokens.sum() == sum(contexts)
    shares = [tokens[program::programs].sum() for program in range(programs)]
    assert max(shares) - min(shares) <= SPLIT_TOKENS


def test_decode_work_of_padding_alone() -> None:
    assert decode_work([0, 0], capacity=1).tolist() == [0] * 5
    assert decode_work([], capacity=0).tolist() == [0]


def test_capacity_is_that_of_the_list() -> None:
    work = decode_work([300, 5], capacity=9)
    assert decode_capacity(work.size, rows=2) == 9
    with pytest.raises(ValueError, match="3 items of decode work, but room for 2"):
        decode_work([300, 5], capacity=2)
    assert decode_work([300, 5], capacity=int(num_splits([300, 5]).sum()))[0] == 3


def test_decode_work_of_a_window_has_the_splits_that_it_touches() -> None:
    window = SPLIT_TOKENS + 44
    contexts = [5, 2 * SPLIT_TOKENS, 0, 3 * SPLIT_TOKENS, 4 * SPLIT_TOKENS + 45]
    work = decode_work(contexts, capacity=8, window=window)
    assert num_splits(contexts, window).tolist() == [1, 2, 0, 2, 2]
    assert work[0] == 7
    # Split s of a row has the place of this number plus s.
    assert work[1:6].tolist() == [0, 1, 3, 2, 2]
    tokens = [(1, 1), (3, 2), (4, 3), (4, 4), (1, 0), (3, 1), (0, 0)]
    assert [tuple(item) for item in work[6:].reshape(8, 2)[:7].tolist()] == tokens
    wide = decode_work(contexts, capacity=20, window=10_000)
    assert wide.tolist() == decode_work(contexts, capacity=20).tolist()


def test_prefill_work_covers_each_row_once_longest_first() -> None:
    work = prefill_work([5, 128, 0, 200], tile=64)
    assert work.dtype == np.int32
    # Attending to 200, 192, 128, 128, 64, 64 and 5 tokens.
    items = [(3, 3), (3, 2), (1, 1), (3, 1), (1, 0), (3, 0), (0, 0)]
    assert (work[0], items_of(work)) == (7, items)


def test_prefill_work_has_room_for_as_many_items_as_asked() -> None:
    work = prefill_work([5, 128], tile=64, capacity=5)
    assert prefill_capacity(work.size) == 5
    assert (work[0], items_of(work)) == (3, [(1, 1), (1, 0), (0, 0), (0, 0), (0, 0)])
    with pytest.raises(ValueError, match="3 items of prefill work, but room for 2"):
        prefill_work([5, 128], tile=64, capacity=2)


def test_prefill_work_of_chunks_counts_the_tokens_before_them() -> None:
    work = prefill_work([64, 100], tile=64, context_lens=[1000, 100])
    assert items_of(work) == [(0, 0), (1, 1), (1, 0)]


def test_prefill_work_of_a_window_counts_what_its_tiles_see() -> None:
    # The first job's tile sees 59 tokens, not 1000.
    work = prefill_work([10, 100], tile=64, context_lens=[1000, 100], window=50)
    assert items_of(work) == [(1, 1), (1, 0), (0, 0)]


def test_prefill_work_of_nothing() -> None:
    assert prefill_work([], tile=64).tolist() == [0]
    assert prefill_work([0], tile=64).tolist() == [0]


def items_of(prefill_work: NDArray[np.int32]) -> list[tuple[int, ...]]:
    return [tuple(item) for item in prefill_work[1:].reshape(-1, 2).tolist()]
