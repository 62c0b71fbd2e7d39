from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fastserve_kernels import ops, reference
from torch import Tensor

Close = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 768), (3, 16), (5, 100), (70, 1024), (0, 64)])
def test_add_layer_norm(
    backend: str, close: Close, rows: int, size: int, dtype: torch.dtype, affine: str
) -> None:
    # Strided rows, and a mean far from zero: the variance must not cancel.
    x = torch.randn(rows, 2 * size).to(dtype)[:, :size] + 3
    residual = torch.randn(rows, 3 * size).to(dtype)[:, size : 2 * size]
    weight = torch.randn(size).to(dtype) if affine != "none" else None
    bias = torch.randn(size).to(dtype) if affine == "both" else None
    total, normed = ops.add_layer_norm(x, residual, weight, bias, 1e-5)
    expected_total, expected = reference.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, expected_total)
    assert total.dtype == dtype
    close(normed, expected)


@pytest.mark.parametrize("size", [33, 40, 72, 768])
@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_layer_norm_of_rows_far_from_zero(backend: str, size: int, mean: float) -> None:
    """As near as float32 has the rows themselves: lanes past the end count for nothing."""
    x = torch.randn(4, size) * 0.1 + mean
    zero = torch.zeros_like(x)
    _, normed = ops.add_layer_norm(x, zero, None, None, 1e-5)
    _, expected = reference.add_layer_norm(x, zero, None, None, 1e-5)
    rounding = mean * torch.finfo(torch.float32).eps / 0.1
    assert (normed.double() - expected.double()).abs().max() < 5 * rounding


def test_constant_rows_normalise_to_the_bias(backend: str) -> None:
    x = torch.full((2, 100), 5.0)
    _, normed = ops.add_layer_norm(x, x, None, torch.full((100,), 0.5), 1e-5)
    torch.testing.assert_close(normed, torch.full((2, 100), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 16), (5, 100), (70, 1024), (0, 64)])
def test_add_rms_norm(backend: str, close: Close, rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * size).to(dtype)[:, :size]
    residual = torch.randn(rows, 3 * size).to(dtype)[:, size : 2 * size]
    weight = torch.randn(size).to(dtype)
    total, normed = ops.add_rms_norm(x, residual, weight, 1e-5)
    expected_total, expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert normed.dtype == dtype
    close(normed, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "dim"),
    [
        (1, 12, 64, 64),
        (3, 5, 128, 128),
        (4, 2, 40, 10),
        (2, 3, 16, 2),
        (40, 8, 96, 24),
        (0, 2, 8, 8),
    ],
)
def test_rotate(
    backend: str, close: Close, tokens: int, heads: int, head_dim: int, dim: int, dtype: torch.dtype
) -> None:
    rows = torch.randn(tokens, heads + 2, head_dim).to(dtype)  # heads that are not rotated follow
    angles = torch.randn(tokens, dim // 2) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    before = rows.clone()
    ops.rotate(rows[:, :heads], cos_sin)
    close(rows[:, :heads], reference.rotate(before[:, :heads], cos_sin))
    assert torch.equal(rows[:, heads:], before[:, heads:])
    assert torch.equal(rows[..., dim:], before[..., dim:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (3, 7), (40, 1024), (0, 8)])
def test_silu_mul(backend: str, close: Close, rows: int, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 2 * size + 3) * 4).to(dtype)[:, : 2 * size]
    out = ops.silu_mul(x)
    assert out.dtype == dtype
    close(out, reference.silu_mul(x))


def test_silu_mul_of_extremes(backend: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]])
    out = ops.silu_mul(torch.cat([gate, torch.ones(1, 6)], dim=1))
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 1e30]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 1024), (17, 50_272), (2, 1025)])
def test_argmax_rows(backend: str, rows: int, size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, size + 3).to(dtype)[:, :size]
    assert torch.equal(ops.argmax_rows(logits), reference.argmax_rows(logits))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_argmax_takes_the_first_of_equals(backend: str, special: float) -> None:
    logits = torch.full((3, 3000), float("-inf"), dtype=torch.bfloat16)
    logits[0, [1234, 2999]] = special
    logits[1, [0, 17]] = special
    logits[2, [2500, 2501]] = 1.0
    expected = [0, 0, 2500] if special == float("-inf") else [1234, 0, 2500]
    assert ops.argmax_rows(logits).tolist() == expected
