from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from fastserve_kernels import ops, reference
from torch import Tensor

Close = Callable[[Tensor, Tensor], None]
NAN = float("nan")
LAYERS, LAYER = 3, 1


@dataclass
class Cache:
    """A cache whose every unused block and slot is NaN, and jobs at random places in it."""

    kv: Tensor
    block_tables: Tensor
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def make_cache(
    lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> Cache:
    needed = [-(-n // block_size) for n in lengths]
    total = sum(needed) + 3
    kv = torch.full((total, LAYERS, 2, kv_heads, block_size, head_dim), NAN, dtype=dtype)
    free = torch.randperm(total).tolist()
    # Table entries past a job's blocks point at a block that stays NaN.
    poisoned = free.pop()
    tables = torch.full((len(lengths), max(needed) + 2), poisoned, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        for i in range(count):
            block = free.pop()
            tables[row, i] = block
            used = min(block_size, length - i * block_size)
            kv[block, LAYER, :, :, :used] = torch.randn(2, kv_heads, used, head_dim).to(dtype)
    return Cache(kv, tables, head_dim)


def fused(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """query, key and value as strided views into one matrix, as a fused projection gives them."""
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    return list(qkv.split([heads, kv_heads, kv_heads], dim=1))


DECODE_CASES = [
    # lengths, heads, kv_heads, head_dim, block_size
    ([1], 1, 1, 64, 16),
    ([1, 15, 16, 17], 4, 4, 64, 16),
    ([255, 256, 257], 4, 4, 64, 16),
    ([2048, 3], 2, 2, 64, 16),
    ([255, 17, 1], 8, 2, 64, 16),
    ([257, 16], 6, 1, 128, 16),
    ([33, 64, 65], 4, 2, 80, 16),
    ([31, 95], 2, 1, 128, 32),
    ([7, 50], 3, 3, 8, 8),
    ([21, 40], 2, 2, 72, 4),
    ([66, 12], 2, 1, 256, 16),
    ([100, 5], 40, 40, 64, 16),
]


def expected_decode(query: Tensor, cache: Cache, contexts: Tensor, scale: float) -> Tensor:
    rows = torch.arange(len(query))
    return reference.paged_attention(
        query, cache.kv, LAYER, cache.block_tables, rows, contexts, scale
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode(backend: str, close: Close, case: tuple, dtype: torch.dtype) -> None:
    lengths, heads, kv_heads, head_dim, block_size = case
    cache = make_cache(lengths, kv_heads, head_dim, block_size, dtype)
    query = fused(len(lengths), heads, kv_heads, head_dim, dtype)[0]
    contexts = torch.tensor(lengths, dtype=torch.int32)
    out = ops.paged_decode(query, cache.kv, LAYER, cache.block_tables, contexts, cache.scale)
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, expected_decode(query, cache, contexts, cache.scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_decodes_are_zero(backend: str, close: Close, dtype: torch.dtype) -> None:
    cache = make_cache([5, 130, 9], 2, 64, 16, dtype)
    contexts = torch.tensor([0, 130, 0], dtype=torch.int32)
    query = fused(3, 4, 2, 64, dtype)[0]
    out = ops.paged_decode(query, cache.kv, LAYER, cache.block_tables, contexts, cache.scale)
    close(out, expected_decode(query, cache, contexts, cache.scale))
    assert not out[0].any()
    assert not out[-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_that_is_no_number_is_not_hidden(backend: str, dtype: torch.dtype) -> None:
    """The second job's, whichever position of its context it has; the first has nothing of it."""
    contexts = torch.tensor([70, 70], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    for position in (0, 40, 69):
        cache = make_cache([70, 70], 1, 64, 16, dtype)
        query = fused(2, 1, 1, 64, dtype)[0]
        block = cache.block_tables[1, position // 16]
        cache.kv[block, LAYER, 0, 0, position % 16, 5] = NAN
        shared = (query, cache.kv, LAYER, cache.block_tables, contexts)
        for out in (
            ops.paged_decode(*shared, cache.scale),
            ops.paged_prefill(*shared, starts, cache.scale),
        ):
            assert out[0].isfinite().all()
            assert out[1].isnan().all()


def test_no_rows(backend: str) -> None:
    cache = make_cache([4], 2, 64, 16, torch.float32)
    empty, query = torch.empty(0, dtype=torch.int32), torch.empty(0, 2, 64)
    shared = (query, cache.kv, 0, cache.block_tables[:0], empty)
    assert ops.paged_decode(*shared, 1.0).shape == (0, 2, 64)
    starts = torch.zeros(1, dtype=torch.int32)
    assert ops.paged_prefill(*shared, starts, 1.0).shape == (0, 2, 64)


def test_writes_into_the_given_rows_only(backend: str, close: Close) -> None:
    cache = make_cache([20, 30], 2, 64, 16, torch.float32)
    contexts = torch.tensor([20, 30], dtype=torch.int32)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    shared = (cache.kv, LAYER, cache.block_tables, contexts)
    query = fused(5, 2, 2, 64, torch.float32)[0]
    of_prefill = expected_prefill([(3, 20), (2, 30)], query, cache)
    of_decode = expected_decode(query[:2], cache, contexts, cache.scale)
    for expected, call, more in (
        (of_decode, ops.paged_decode, ()),
        (of_prefill, ops.paged_prefill, (starts,)),
    ):
        count = len(expected)
        whole = torch.full((count + 2, 2, 64), 7.0)
        out = whole[1:-1]
        returned = call(query[:count], *shared, *more, cache.scale, out=out)
        assert returned.data_ptr() == out.data_ptr()
        close(out, expected)
        assert (whole[[0, -1]] == 7).all()
        assert not (out == 7).any()


def test_large_scores_do_not_overflow(backend: str, close: Close) -> None:
    cache = make_cache([70], 1, 64, 16, torch.float32)
    contexts, starts = torch.tensor([70], dtype=torch.int32), torch.tensor([0, 1]).int()
    query = fused(1, 1, 1, 64, torch.float32)[0] * 300
    expected = expected_decode(query, cache, contexts, 1.0)
    shared = (query, cache.kv, LAYER, cache.block_tables, contexts)
    close(ops.paged_decode(*shared, 1.0), expected)
    close(ops.paged_prefill(*shared, starts, 1.0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    assert ops.set_cpu_backend("compiled") == "compiled"
    lengths = [300, 17, 64, 129]
    cache = make_cache(lengths, 2, 64, 16, dtype)
    query = fused(4, 4, 2, 64, dtype)[0]
    contexts = torch.tensor(lengths, dtype=torch.int32)

    def decode(rows: slice) -> Tensor:
        tables = cache.block_tables[rows]
        return ops.paged_decode(query[rows], cache.kv, LAYER, tables, contexts[rows], cache.scale)

    together = decode(slice(None))
    for i in range(4):
        assert torch.equal(decode(slice(i, i + 1))[0], together[i])


PREFILL_CASES = [
    # (rows, context) of each job, heads, kv_heads, head_dim, block_size
    ([(1, 1)], 2, 2, 64, 16),
    ([(15, 15), (16, 16), (17, 17)], 2, 2, 64, 16),
    ([(128, 128)], 4, 2, 80, 16),
    ([(70, 70), (17, 17)], 4, 1, 128, 32),
    ([(65, 65)], 2, 2, 8, 8),
    ([(300, 300), (64, 64)], 8, 1, 64, 16),
    ([(15, 40), (60, 130), (1, 9)], 4, 2, 64, 16),
    ([(1, 257), (12, 64), (13, 65), (31, 95)], 6, 3, 72, 4),
    ([(100, 101), (2, 300)], 2, 1, 256, 16),
]


def prefill(
    spans: list[tuple[int, int]], query: Tensor, cache: Cache, jobs: slice = slice(None)
) -> Tensor:
    """Of a cache's jobs, (rows, context) each."""
    contexts = torch.tensor([context for _, context in spans], dtype=torch.int32)
    rows = torch.tensor([0, *(rows for rows, _ in spans)])
    tables = cache.block_tables[jobs]
    starts = rows.cumsum(0).int()
    return ops.paged_prefill(query, cache.kv, LAYER, tables, contexts, starts, cache.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill(backend: str, close: Close, case: tuple, dtype: torch.dtype) -> None:
    spans, heads, kv_heads, head_dim, block_size = case
    cache = make_cache([context for _, context in spans], kv_heads, head_dim, block_size, dtype)
    query = fused(sum(rows for rows, _ in spans), heads, kv_heads, head_dim, dtype)[0]
    out = prefill(spans, query, cache)
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, expected_prefill(spans, query, cache))


def expected_prefill(spans: list[tuple[int, int]], query: Tensor, cache: Cache) -> Tensor:
    seen = [
        (job, context - rows + row + 1)
        for job, (rows, context) in enumerate(spans)
        for row in range(rows)
    ]
    jobs, contexts = (torch.tensor(column) for column in zip(*seen, strict=True))
    return reference.paged_attention(
        query, cache.kv, LAYER, cache.block_tables, jobs, contexts, cache.scale
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_prompts_depend_neither_on_the_batch_nor_on_chunks(dtype: torch.dtype) -> None:
    ops.set_cpu_backend("compiled")
    lengths = [30, 140, 30]
    cache = make_cache(lengths, 2, 64, 16, dtype)
    query = fused(200, 4, 2, 64, dtype)[0]
    together = prefill([(length, length) for length in lengths], query, cache)
    for first, end in ((0, 140), (0, 69), (69, 140), (5, 6), (139, 140)):
        rows = query[30 + first : 30 + end]
        alone = prefill([(end - first, end)], rows, cache, slice(1, 2))
        assert torch.equal(alone, together[30 + first : 30 + end])


def test_half_precision_runs_in_plain_torch(close: Close) -> None:
    cache = make_cache([20, 33], 2, 64, 16, torch.float16)
    query = fused(2, 2, 2, 64, torch.float16)[0]
    contexts = torch.tensor([20, 33], dtype=torch.int32)
    out = ops.paged_decode(query, cache.kv, LAYER, cache.block_tables, contexts, cache.scale)
    expected = expected_decode(query, cache, contexts, cache.scale)
    close(out, expected)
    close(prefill([(1, 20), (1, 33)], query, cache), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "kv_heads", "head_dim"), [(7, 2, 64), (300, 3, 80)])
def test_kv_write(
    backend: str, tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    kv = torch.randn(40, LAYERS, 2, kv_heads, 16, head_dim).to(dtype)
    _, key, value = fused(tokens, kv_heads, kv_heads, head_dim, dtype)
    slots = torch.randperm(40 * 16)[:tokens]
    slots[::5] = -1
    expected = reference.kv_write(kv, LAYER, key, value, slots)
    ops.kv_write(kv, LAYER, key, value, slots)
    assert torch.equal(kv, expected)
