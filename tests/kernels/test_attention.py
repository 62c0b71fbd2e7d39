"""CPU attention on the same caches, lengths and shapes as the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from attention_cases import (
    ALL_AT_ONCE,
    DECODE,
    DECODE_VARIANTS,
    LAYER,
    PLAIN,
    PREFILL,
    PREFILL_VARIANTS,
    Cache,
    Shape,
    Variant,
    decode_cache,
    prefill_cache,
    queries,
)
from fastserve_kernels import ops
from kernel_cases import NAN
from torch import Tensor

Close = Callable[[Tensor, Tensor], None]
SHAPE = Shape(4, 2, 64)
RULE = PLAIN.rule(SHAPE)
DECODES = [*((*one, PLAIN) for one in DECODE), *DECODE_VARIANTS]
PREFILLS = [*((*one, PLAIN) for one in PREFILL), *PREFILL_VARIANTS]


def decode(
    query: Tensor,
    cache: Cache,
    contexts: Sequence[int],
    rule: ops.AttentionRule,
    out: Tensor | None = None,
) -> Tensor:
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return ops.paged_decode(
        query,
        cache.kv,
        LAYER,
        cache.block_tables,
        cache.table_starts,
        lengths,
        rule,
        out,
    )


def prefill(
    query: Tensor,
    cache: Cache,
    jobs: Sequence[tuple[int, int]],
    rule: ops.AttentionRule,
    out: Tensor | None = None,
) -> Tensor:
    """Prefills of jobs, each (rows, context)."""
    contexts = torch.tensor([context for _, context in jobs], dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(rows for rows, _ in jobs)], dtype=torch.int32)
    tables = cache.block_tables, cache.table_starts
    return ops.paged_prefill(query, cache.kv, LAYER, *tables, contexts, starts, rule, out)


def result_of(query: Tensor, shape: Shape) -> Tensor | None:
    """Where values are of another size than keys, the caller gives the memory of the result."""
    if shape.value_dim == shape.head_dim:
        return None
    return torch.full((len(query), shape.heads, shape.value_dim), NAN, dtype=query.dtype)


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("contexts", "shape", "variant"), DECODES, ids=str)
def test_decode(
    backend: str,
    close: Close,
    contexts: list[int],
    shape: Shape,
    variant: Variant,
    dtype: torch.dtype,
    is_int8: bool,
) -> None:
    rule = variant.rule(shape)
    cache = decode_cache(contexts, shape, dtype, rule, is_int8)
    query = queries(len(contexts), shape, dtype)
    out = decode(query, cache, contexts, rule, result_of(query, shape))
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, cache.decode(query, contexts, rule))


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("jobs", "shape", "variant"), PREFILLS, ids=str)
def test_prefill(
    backend: str,
    close: Close,
    jobs: list[tuple[int, int]],
    shape: Shape,
    variant: Variant,
    dtype: torch.dtype,
    is_int8: bool,
) -> None:
    jobs = [job for job in jobs if job[0] > 0]
    rule = variant.rule(shape)
    cache = prefill_cache(jobs, shape, dtype, rule, is_int8)
    query = queries(sum(rows for rows, _ in jobs), shape, dtype)
    out = prefill(query, cache, jobs, rule, result_of(query, shape))
    assert out.is_contiguous()
    assert out.dtype == dtype
    close(out, cache.prefill(query, jobs, rule))


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_size_and_group(
    backend: str, close: Close, dtype: torch.dtype, is_int8: bool
) -> None:
    contexts = [7, 141]  # more positions than are read at a time, in part of the last block
    for group in range(1, 17):
        shape = Shape(2 * group, 2, 16 * group)
        rule = PLAIN.rule(shape)
        cache = Cache.filled(contexts, shape, dtype, is_int8)
        query = queries(5, shape, dtype)
        close(decode(query[:2], cache, contexts, rule), cache.decode(query[:2], contexts, rule))
        jobs = [(2, 7), (3, 141)]
        close(prefill(query, cache, jobs, rule), cache.prefill(query, jobs, rule))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_decodes_are_zero(backend: str, close: Close, dtype: torch.dtype) -> None:
    """Padding rows are zero whatever their block tables hold."""
    cache = Cache.filled([5, 130, 9], SHAPE, dtype)
    query = queries(3, SHAPE, dtype)
    out = decode(query, cache, [0, 130, 0], RULE)
    close(out, cache.decode(query, [0, 130, 0], RULE))
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
            decode(query, cache, [300, 300], RULE),
            prefill(query, cache, [(1, 300), (1, 300)], RULE),
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
        cache.decode(query[:2], contexts, RULE),
        lambda out: decode(query[:2], cache, contexts, RULE, out),
    )
    check(cache.prefill(query, jobs, RULE), lambda out: prefill(query, cache, jobs, RULE, out))


def test_large_scores_do_not_overflow(backend: str, close: Close) -> None:
    shape = Shape(1, 1, 64)
    cache = Cache.filled([70], shape, torch.float32)
    query = queries(1, shape, torch.float32) * 300
    rule = ops.AttentionRule(1.0)
    expected = cache.decode(query, [70], rule)
    close(decode(query, cache, [70], rule), expected)
    close(prefill(query, cache, [(1, 70)], rule), expected)


@pytest.mark.parametrize("variant", [PLAIN, ALL_AT_ONCE], ids=str)
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_do_not_depend_on_the_batch(
    dtype: torch.dtype, is_int8: bool, variant: Variant
) -> None:
    assert ops.set_cpu_backend("compiled") == "compiled"
    contexts, rule = [300, 17, 64, 129], variant.rule(SHAPE)
    cache = decode_cache(contexts, SHAPE, dtype, rule, is_int8)
    query = queries(4, SHAPE, dtype)
    together = decode(query, cache, contexts, rule)
    for i in range(4):
        own = slice(i, i + 1)
        alone = decode(query[own], cache.of(own), contexts[own], rule)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("variant", [PLAIN, Variant(window=256), ALL_AT_ONCE], ids=str)
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_prompts_depend_neither_on_the_batch_nor_on_chunks(
    dtype: torch.dtype, is_int8: bool, variant: Variant
) -> None:
    ops.set_cpu_backend("compiled")
    lengths, rule = [30, 600, 30], variant.rule(SHAPE)
    cache = Cache.filled(lengths, SHAPE, dtype, is_int8)
    query = queries(660, SHAPE, dtype)
    together = prefill(query, cache, [(length, length) for length in lengths], rule)
    second = cache.of(slice(1, 2))
    for first, end in ((0, 600), (0, 69), (69, 300), (257, 600), (5, 6), (520, 521), (599, 600)):
        rows = slice(30 + first, 30 + end)
        forgotten = second.without_blocks_before(rule.first_visible(first))
        alone = prefill(query[rows], forgotten, [(end - first, end)], rule)
        assert torch.equal(alone, together[rows])


def test_half_precision_runs_in_plain_torch(close: Close) -> None:
    contexts, jobs, rule = [20, 33], [(1, 20), (1, 33)], ALL_AT_ONCE.rule(SHAPE)
    cache = Cache.filled(contexts, SHAPE, torch.float16)
    query = queries(2, SHAPE, torch.float16)
    expected = cache.decode(query, contexts, rule)
    close(decode(query, cache, contexts, rule), expected)
    close(prefill(query, cache, jobs, rule), expected)
