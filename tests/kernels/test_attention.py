"""CPU attention on the same caches, lengths and shapes as the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from attention_cases import DECODE, LAYER, PREFILL, Cache, Shape, queries
from fastserve_kernels import ops
from kernel_cases import NAN
from torch import Tensor

Close = Callable[[Tensor, Tensor], None]
SHAPE, SCALE = Shape(4, 2, 64), 64**-0.5


def decode(
    query: Tensor, cache: Cache, contexts: Sequence[int], scale: float, out: Tensor | None = None
) -> Tensor:
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return ops.paged_decode(
        query,
        cache.kv,
        LAYER,
        cache.block_tables,
        cache.table_starts,
        lengths,
        ops.AttentionRule(scale),
        out,
    )


def prefill(
    query: Tensor,
    cache: Cache,
    jobs: Sequence[tuple[int, int]],
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Prefills of jobs, each (rows, context)."""
    contexts = torch.tensor([context for _, context in jobs], dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(rows for rows, _ in jobs)], dtype=torch.int32)
    tables = cache.block_tables, cache.table_starts
    rule = ops.AttentionRule(scale)
    return ops.paged_prefill(query, cache.kv, LAYER, *tables, contexts, starts, rule, out)


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("contexts", "shape"), DECODE, ids=str)
def test_decode(
    backend: str, close: Close, contexts: list[int], shape: Shape, dtype: torch.dtype, is_int8: bool
) -> None:
    cache = Cache.filled(contexts, shape, dtype, is_int8)
    query, scale = queries(len(contexts), shape, dtype), shape.head_dim**-0.5
    out = decode(query, cache, contexts, scale)
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, cache.decode(query, contexts, scale))


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("jobs", "shape"), PREFILL, ids=str)
def test_prefill(
    backend: str,
    close: Close,
    jobs: list[tuple[int, int]],
    shape: Shape,
    dtype: torch.dtype,
    is_int8: bool,
) -> None:
    jobs = [job for job in jobs if job[0] > 0]
    cache = Cache.filled([context for _, context in jobs], shape, dtype, is_int8)
    query = queries(sum(rows for rows, _ in jobs), shape, dtype)
    scale = shape.head_dim**-0.5
    out = prefill(query, cache, jobs, scale)
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, cache.prefill(query, jobs, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_decodes_are_zero(backend: str, close: Close, dtype: torch.dtype) -> None:
    """Padding rows are zero whatever their block tables hold."""
    cache = Cache.filled([5, 130, 9], SHAPE, dtype)
    query = queries(3, SHAPE, dtype)
    out = decode(query, cache, [0, 130, 0], SCALE)
    close(out, cache.decode(query, [0, 130, 0], SCALE))
    assert not out[0].any()
    assert not out[-1].any()


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_that_is_no_number_is_not_hidden(
    backend: str, dtype: torch.dtype, is_int8: bool
) -> None:
    """A NaN at any position of the second job's context reaches its row, and not the first
    job's."""
    shape = Shape(1, 1, 64)
    for position in (0, 40, 299):
        cache = Cache.filled([300, 300], shape, dtype)
        query = queries(2, shape, dtype)
        block = cache.block_tables[cache.table_starts[1] + position // 16]
        cache.kv[block, LAYER, 0, 0, position % 16, 5] = NAN
        cache = cache.in_int8() if is_int8 else cache
        for out in (
            decode(query, cache, [300, 300], SCALE),
            prefill(query, cache, [(1, 300), (1, 300)], SCALE),
        ):
            assert out[0].isfinite().all()
            assert out[1].isnan().all()


def test_writes_into_the_given_rows_only(backend: str, close: Close) -> None:
    shape, contexts, jobs = Shape(2, 2, 64), [20, 30], [(3, 20), (2, 30)]
    cache = Cache.filled(contexts, shape, torch.float32)
    query = queries(5, shape, torch.float32)

    def check(expected: Tensor, run: Callable[[Tensor], Tensor]) -> None:
        whole = torch.full((len(expected) + 2, 2, 64), 7.0)
        out = whole[1:-1]
        assert run(out).data_ptr() == out.data_ptr()
        close(out, expected)
        assert (whole[[0, -1]] == 7).all()
        assert not (out == 7).any()

    check(
        cache.decode(query[:2], contexts, SCALE),
        lambda out: decode(query[:2], cache, contexts, SCALE, out),
    )
    check(cache.prefill(query, jobs, SCALE), lambda out: prefill(query, cache, jobs, SCALE, out))


def test_large_scores_do_not_overflow(backend: str, close: Close) -> None:
    shape = Shape(1, 1, 64)
    cache = Cache.filled([70], shape, torch.float32)
    query = queries(1, shape, torch.float32) * 300
    expected = cache.decode(query, [70], 1.0)
    close(decode(query, cache, [70], 1.0), expected)
    close(prefill(query, cache, [(1, 70)], 1.0), expected)


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_do_not_depend_on_the_batch(dtype: torch.dtype, is_int8: bool) -> None:
    assert ops.set_cpu_backend("compiled") == "compiled"
    contexts = [300, 17, 64, 129]
    cache = Cache.filled(contexts, SHAPE, dtype, is_int8)
    query = queries(4, SHAPE, dtype)
    together = decode(query, cache, contexts, SCALE)
    for i in range(4):
        own = slice(i, i + 1)
        alone = decode(query[own], cache.of(own), contexts[own], SCALE)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_prompts_depend_neither_on_the_batch_nor_on_chunks(
    dtype: torch.dtype, is_int8: bool
) -> None:
    ops.set_cpu_backend("compiled")
    lengths = [30, 600, 30]
    cache = Cache.filled(lengths, SHAPE, dtype, is_int8)
    query = queries(660, SHAPE, dtype)
    together = prefill(query, cache, [(length, length) for length in lengths], SCALE)
    second = cache.of(slice(1, 2))
    for first, end in ((0, 600), (0, 69), (69, 300), (257, 600), (5, 6), (520, 521), (599, 600)):
        rows = slice(30 + first, 30 + end)
        alone = prefill(query[rows], second, [(end - first, end)], SCALE)
        assert torch.equal(alone, together[rows])


def test_half_precision_runs_in_plain_torch(close: Close) -> None:
    shape, contexts = Shape(2, 2, 64), [20, 33]
    cache = Cache.filled(contexts, shape, torch.float16)
    query = queries(2, shape, torch.float16)
    expected = cache.decode(query, contexts, SCALE)
    close(decode(query, cache, contexts, SCALE), expected)
    close(prefill(query, cache, [(1, 20), (1, 33)], SCALE), expected)
