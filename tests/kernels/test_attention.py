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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode(backend: str, close: Close, case: tuple, dtype: torch.dtype) -> None:
    lengths, heads, kv_heads, head_dim, block_size = case
    cache = make_cache(lengths, kv_heads, head_dim, block_size, dtype)
    query = fused(len(lengths), heads, kv_heads, head_dim, dtype)[0]
    rows = torch.arange(len(lengths), dtype=torch.int32)
    contexts = torch.tensor(lengths, dtype=torch.int32)
    arguments = (query, cache.kv, LAYER, cache.block_tables, rows, contexts, cache.scale)
    out = ops.paged_attention(*arguments)
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, reference.paged_attention(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_decode_rows_and_padding_in_one_call(
    backend: str, close: Close, dtype: torch.dtype
) -> None:
    cache = make_cache([40, 130, 9], 2, 64, 16, dtype)
    # Rows 25..39 of job 0, rows 70..129 of job 1, one row of job 2, padding at both ends.
    spans = [(0, 0, 1), (0, 26, 41), (1, 71, 131), (2, 9, 10), (1, 0, 1)]
    rows = torch.tensor([r for r, a, b in spans for _ in range(a, b)], dtype=torch.int32)
    contexts = torch.tensor([n for _, a, b in spans for n in range(a, b)], dtype=torch.int32)
    query = fused(len(rows), 4, 2, 64, dtype)[0]
    arguments = (query, cache.kv, LAYER, cache.block_tables, rows, contexts, cache.scale)
    out = ops.paged_attention(*arguments)
    close(out, reference.paged_attention(*arguments))
    assert not out[0].any()
    assert not out[-1].any()


def test_no_rows(backend: str) -> None:
    cache = make_cache([4], 2, 64, 16, torch.float32)
    empty = torch.empty(0, dtype=torch.int32)
    query = torch.empty(0, 2, 64)
    out = ops.paged_attention(query, cache.kv, 0, cache.block_tables, empty, empty, 1.0)
    assert out.shape == (0, 2, 64)


def test_writes_into_the_given_rows_only(backend: str, close: Close) -> None:
    cache = make_cache([20, 30], 2, 64, 16, torch.float32)
    query = fused(2, 2, 2, 64, torch.float32)[0]
    rows = torch.arange(2, dtype=torch.int32)
    contexts = torch.tensor([20, 30], dtype=torch.int32)
    whole = torch.full((4, 2, 64), 7.0)
    arguments = (query, cache.kv, LAYER, cache.block_tables, rows, contexts, cache.scale)
    returned = ops.paged_attention(*arguments, out=whole[1:3])
    assert returned.data_ptr() == whole[1:3].data_ptr()
    close(whole[1:3], reference.paged_attention(*arguments))
    assert (whole[0] == 7).all()
    assert (whole[3] == 7).all()


def test_large_scores_do_not_overflow(backend: str, close: Close) -> None:
    cache = make_cache([70], 1, 64, 16, torch.float32)
    query = fused(1, 1, 1, 64, torch.float32)[0] * 300
    one = torch.zeros(1, dtype=torch.int32)
    arguments = (query, cache.kv, LAYER, cache.block_tables, one, one + 70, 1.0)
    close(ops.paged_attention(*arguments), reference.paged_attention(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    assert ops.set_cpu_backend("compiled") == "compiled"
    lengths = [300, 17, 64, 129]
    cache = make_cache(lengths, 2, 64, 16, dtype)
    query = fused(4, 4, 2, 64, dtype)[0]
    rows = torch.arange(4, dtype=torch.int32)
    contexts = torch.tensor(lengths, dtype=torch.int32)
    shared = (cache.kv, LAYER, cache.block_tables)
    together = ops.paged_attention(query, *shared, rows, contexts, cache.scale)
    for i in range(4):
        one = slice(i, i + 1)
        alone = ops.paged_attention(query[one], *shared, rows[one], contexts[one], cache.scale)
        assert torch.equal(alone[0], together[i])


PREFILL_CASES = [
    # ranges, rows, heads, kv_heads, head_dim
    ([(0, 1)], 1, 2, 2, 64),
    ([(0, 15), (15, 31), (31, 48)], 48, 2, 2, 64),
    ([(3, 131)], 140, 4, 2, 80),
    ([(0, 70), (80, 97)], 97, 4, 1, 128),
    ([(2, 67)], 67, 2, 2, 8),
    ([(0, 300), (300, 364)], 364, 8, 1, 64),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill(backend: str, close: Close, case: tuple, dtype: torch.dtype) -> None:
    ranges, tokens, heads, kv_heads, head_dim = case
    query, key, value = fused(tokens, heads, kv_heads, head_dim, dtype)
    outside = torch.ones(tokens, dtype=torch.bool)
    for start, end in ranges:
        outside[start:end] = False
    for tensor in (query, key, value):
        tensor[outside] = NAN
    scale = head_dim**-0.5
    out = ops.prefill_attention(query, key, value, ranges, scale)
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, reference.prefill_attention(query, key, value, ranges, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_prompts_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    ops.set_cpu_backend("compiled")
    query, key, value = fused(200, 4, 2, 64, dtype)
    together = ops.prefill_attention(query, key, value, [(0, 30), (30, 170), (170, 200)], 0.125)
    own = slice(30, 170)
    alone = ops.prefill_attention(query[own], key[own], value[own], [(0, 140)], 0.125)
    assert torch.equal(alone, together[own])
    shorter = ops.prefill_attention(query[30:99], key[30:99], value[30:99], [(0, 69)], 0.125)
    assert torch.equal(shorter, together[30:99])


def test_prefill_leaves_other_rows_of_out(backend: str) -> None:
    query, key, value = fused(30, 2, 2, 64, torch.bfloat16)
    out = torch.full((30, 2, 64), 7.0, dtype=torch.bfloat16)
    ops.prefill_attention(query, key, value, [(10, 20)], 0.125, out=out)
    assert (out[:10] == 7).all()
    assert (out[20:] == 7).all()
    assert not (out[10:20] == 7).all()


def test_half_precision_runs_in_plain_torch(close: Close) -> None:
    cache = make_cache([20, 33], 2, 64, 16, torch.float16)
    query, key, value = fused(2, 2, 2, 64, torch.float16)
    rows = torch.arange(2, dtype=torch.int32)
    contexts = torch.tensor([20, 33], dtype=torch.int32)
    arguments = (query, cache.kv, LAYER, cache.block_tables, rows, contexts, cache.scale)
    close(ops.paged_attention(*arguments), reference.paged_attention(*arguments))
    out = ops.prefill_attention(query, key, value, [(0, 2)], 0.125)
    close(out, reference.prefill_attention(query, key, value, [(0, 2)], 0.125))


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
