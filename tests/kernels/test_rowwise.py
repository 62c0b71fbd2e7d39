from __future__ import annotations

import math

import kernel_reference as reference
import pytest
import torch
from fastserve_kernels import ops
from rowwise_cases import Case, cases_of_ops


@pytest.mark.parametrize("case", list(cases_of_ops()), ids=str)
def test_case(backend: str, case: Case) -> None:
    for comparison in case.run(torch.device("cpu")):
        assert comparison.error <= comparison.limit, comparison.what


@pytest.mark.parametrize("size", [33, 40, 72, 768])
@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_layer_norm_of_rows_far_from_zero(backend: str, size: int, mean: float) -> None:
    """The error is that of float32 rows: vector lanes past the end do not count."""
    x = torch.randn(4, size) * 0.1 + mean
    zero = torch.zeros_like(x)
    _, normed = ops.add_layer_norm(x, zero, None, None, 1e-5)
    _, expected = reference.add_layer_norm(x, zero, None, None, 1e-5)
    rounding = mean * torch.finfo(torch.float32).eps / 0.1
    assert (normed.double() - expected.double()).abs().max() < 5 * rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 1024), (17, 50_272), (2, 1025)])
def test_greedy_tokens(backend: str, rows: int, size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, size + 3).to(dtype)[:, :size]
    expected = reference.greedy_tokens(logits)
    assert all(torch.equal(ids, expected) for ids in ops.greedy_tokens(logits))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_greedy_tokens_are_the_first_of_equals(backend: str, special: float) -> None:
    logits = torch.full((3, 3000), float("-inf"), dtype=torch.bfloat16)
    logits[0, [1234, 2999]] = special
    logits[1, [0, 17]] = special
    logits[2, [2500, 2501]] = 1.0
    expected = [0, 0, 2500] if special == float("-inf") else [1234, 0, 2500]
    token_ids, answers = ops.greedy_tokens(logits)
    assert token_ids.tolist() == expected
    assert answers.tolist() == ([-1, -1, 2500] if math.isnan(special) else expected)
