"""Decodes that begin with the same blocks read them once, and get the bits that they get alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import ALL_AT_ONCE, LAYER, PLAIN, Cache, Shape, Variant, queries
from fastserve_kernels import ops
from fastserve_kernels.common_beginnings import common_beginnings
from torch import Tensor
from torch_threads import torch_threads

CONTEXTS = [300, 290, 129, 800, 64, 700, 17, 0, 257, 299]
SHARED = [(1, 0, 130), (2, 0, 128), (3, 0, 200), (4, 0, 48), (5, 3, 513), (8, 5, 250), (9, 1, 130)]
"""Job, an earlier job, and how many positions it has from that one, in whole blocks: a tree."""
VARIANTS = [
    (Shape(4, 4, 64), PLAIN),
    (Shape(6, 2, 64), ALL_AT_ONCE),
    (Shape(4, 2, 64), Variant(window=299, soft_cap=3.0)),
    (Shape(2, 1, 64), Variant(has_sinks=True)),
    (Shape(3, 3, 80), PLAIN),
    (Shape(40, 1, 64), PLAIN),
    (Shape(8, 2, 128, block_size=32), PLAIN),
    (Shape(5, 5, 24, block_size=4), PLAIN),
    (Shape(2, 1, 192, other_value_dim=128), PLAIN),
]


def shared_cache(shape: Shape, dtype: torch.dtype, is_int8: bool) -> Cache:
    cache = Cache.filled(CONTEXTS, shape, dtype, is_int8)
    tables, starts = cache.block_tables.clone(), cache.table_starts.tolist()
    for job, other, positions in SHARED:
        count = positions // shape.block_size
        tables[starts[job] :][:count] = tables[starts[other] :][:count]
    return replace(cache, block_tables=tables)


def decode(
    query: Tensor,
    cache: Cache,
    jobs: Sequence[int],
    rule: ops.AttentionRule,
    *,
    reads_once: bool = True,
) -> Tensor:
    """The results of these jobs in one call."""
    rows = torch.tensor(jobs)
    lengths = torch.tensor(CONTEXTS, dtype=torch.int32)[rows]
    starts = cache.table_starts[rows]
    size = cache.shape.block_size
    found = common_beginnings(cache.block_tables.numpy(), starts.numpy(), lengths.numpy(), size)
    out = torch.empty((len(jobs), cache.shape.heads, cache.shape.value_dim), dtype=query.dtype)
    tables = cache.block_tables
    beginnings = found if reads_once else None
    return ops.paged_decode(
        query[rows], cache.kv, LAYER, tables, starts, lengths, rule, out, beginnings
    )


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "variant"), VARIANTS, ids=str)
def test_results_are_right(
    backend: str,
    close: Callable[[Tensor, Tensor], None],
    shape: Shape,
    variant: Variant,
    dtype: torch.dtype,
    is_int8: bool,
) -> None:
    rule, cache = variant.rule(shape), shared_cache(shape, dtype, is_int8)
    query = queries(len(CONTEXTS), shape, dtype)
    out = decode(query, cache, range(len(CONTEXTS)), rule)
    close(out, cache.decode(query, CONTEXTS, rule))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "variant"), VARIANTS, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(
    shape: Shape, variant: Variant, dtype: torch.dtype, is_int8: bool, threads: int
) -> None:
    assert ops.set_cpu_backend("compiled") == "compiled"
    rule, cache = variant.rule(shape), shared_cache(shape, dtype, is_int8)
    query = queries(len(CONTEXTS), shape, dtype)
    rng, everyone = random.Random(0), range(len(CONTEXTS))
    alone = torch.cat([decode(query, cache, [job], rule, reads_once=False) for job in everyone])
    with torch_threads(threads):
        for size in (len(CONTEXTS), len(CONTEXTS), 2, 3, 4, 6, 7):
            jobs = rng.sample(everyone, size)
            assert torch.equal(decode(query, cache, jobs, rule), alone[jobs])
        twice = [*everyone, *everyone, *everyone, *everyone]  # more rows than one item takes
        assert torch.equal(decode(query, cache, twice, rule), alone[twice])


def found(
    tables: Sequence[Sequence[int]], contexts: Sequence[int], window: int | None = None
) -> tuple[list[int], list[int]]:
    """Rows in their order, and what each has in common with the one before it; blocks of 4."""
    flat = [block for table in tables for block in table]
    starts = np.cumsum([0, *map(len, tables)], dtype=np.int32)[:-1]
    order, common = common_beginnings(
        np.array(flat, dtype=np.int32), starts, np.array(contexts, dtype=np.int32), 4, window
    )
    return order.tolist(), common.tolist()


def test_rows_without_a_common_block_stay_as_they_are() -> None:
    assert found([], []) == ([], [])
    assert found([[5, 6], [3, 6], [4, 6]], [8, 5, 7]) == ([0, 1, 2], [0, 0, 0])


def test_rows_that_begin_alike_become_neighbours() -> None:
    tables = [[9, 1, 2, 7], [300, 1, 2], [9, 1, 3], [300, 1], [9, 1, 2, 6]]
    # In the order of their full blocks: the fourth one of the last row is not full.
    assert found(tables, [16, 12, 12, 8, 15]) == ([4, 0, 2, 3, 1], [0, 12, 8, 0, 8])


def test_only_full_blocks_count() -> None:
    assert found([[1, 2], [1, 2]], [6, 7])[1] == [0, 4]
    assert found([[1], [1]], [3, 4])[1] == [0, 0]


def test_padding_has_nothing_in_common() -> None:
    assert found([[1, 2], [], [1, 3]], [8, 0, 8]) == ([1, 0, 2], [0, 0, 4])


def test_rows_beyond_a_window_have_nothing_in_common() -> None:
    """Their tables may begin with a later block, so nobody looks at them."""
    assert found([[1, 2], [1, 3], [1, 2]], [6, 7, 8], window=7)[1] == [0, 0, 4]
