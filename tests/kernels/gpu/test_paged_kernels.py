"""Paged attention against its reference: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import ptx.driver
import pytest
import torch
from attention_cases import (
    LAYER,
    Cache,
    Shape,
    cases,
    decode_scratch,
    queries,
    run_decode,
    run_prefill,
)
from case_shapes import but_dtype
from fastserve_kernels.attention_rule import AttentionRule
from kernel_cases import Case
from triton import knobs

DOTS = [torch.float32, torch.float16]


# Rows that see nothing are divided by 0 and not stored. The interpreter's NumPy warns of that.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
# `make test` has all cases on an emulated GPU, in bfloat16.
@pytest.mark.one_of("case", key=but_dtype, every=3 if knobs.runtime.interpret else 1)
@pytest.mark.parametrize("case", list(cases(interpreted=knobs.runtime.interpret)), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what


@pytest.mark.parametrize("dtype", DOTS)
def test_no_number_of_another_layer_or_token_counts(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Where the cases have NaN, the cache holds 0 or 1000 instead: the results are equal."""
    torch.manual_seed(0)
    shape, contexts = Shape(2, 1, 64), [20, 260]
    cache = Cache.filled(contexts, shape, dtype)
    query = queries(2, shape, dtype)
    poisoned, rule = cache.kv.isnan(), AttentionRule(0.1)
    runs: list[Callable[[Cache], torch.Tensor]] = [
        lambda filled: run_decode(filled, query, contexts, rule, kernel_device),
        lambda filled: run_prefill(filled, query, [(1, 20), (1, 260)], rule, kernel_device),
    ]
    for run in runs:
        small, large = (
            run(replace(cache, kv=cache.kv.masked_fill(poisoned, value))) for value in (0.0, 1000.0)
        )
        assert torch.equal(small, large)
    assert not poisoned[:, LAYER].all()


@pytest.mark.parametrize("dtype", DOTS)
def test_scores_of_any_size(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Maxima rise and fall from tile to tile, and other scores lie far below them."""
    torch.manual_seed(0)
    shape, length = Shape(2, 1, 64), 600
    cache = Cache.filled([length], shape, dtype)
    query = queries(1, shape, dtype)
    rule = AttentionRule(3.0)
    expected = cache.decode(query, [length], rule)
    limit = 1e-4 if dtype == torch.float32 else 2e-3
    for result in (
        run_decode(cache, query, [length], rule, kernel_device),
        run_prefill(cache, query, [(1, length)], rule, kernel_device),
    ):
        assert (result - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.skipif(ptx.driver.capability() is None, reason="programs of the emulator have orders")
@pytest.mark.parametrize("shape", [Shape(1, 1, 64), Shape(4, 2, 64)], ids=str)
def test_whichever_split_is_the_last(shape: Shape, kernel_device: torch.device) -> None:
    """The program that ends a row's last split merges them. The row is the same whichever that
    is."""
    torch.manual_seed(0)
    contexts = [1100, 20, 0, 700]
    cache = Cache.filled(contexts, shape, torch.bfloat16)
    query, rule = queries(len(contexts), shape, torch.bfloat16), AttentionRule(0.1)
    scratch = decode_scratch(contexts, shape, kernel_device)
    generator = np.random.default_rng(0)
    expected = run_decode(cache, query, contexts, rule, kernel_device, scratch=scratch)
    for order in (generator.permutation, generator.permutation, lambda count: range(count)[::-1]):
        with ptx.driver.programs_in_order(order):
            result = run_decode(cache, query, contexts, rule, kernel_device, scratch=scratch)
        assert torch.equal(result, expected)
