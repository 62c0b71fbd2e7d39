from __future__ import annotations

import pytest
import torch
from fastserve_kernels import ops
from fastserve_kernels.weight_quantization import dequantize_rows, quantize_rows, row_magnitudes
from kernel_cases import Case
from linear_cases import cases

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_case(backend: str, case: Case) -> None:
    for comparison in case.run(torch.device("cpu")):
        assert comparison.error <= comparison.limit, comparison.what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_multiplied_exactly(dtype: torch.dtype) -> None:
    """The weight has a row for each code, and x has a single element that is not zero."""
    ops.set_cpu_backend("compiled")
    codes = torch.arange(-127, 128).to(dtype)
    weight = torch.stack([codes, torch.full_like(codes, 127)], dim=1)  # the scale is 1
    linear = ops.Int8Linear(weight)
    x = torch.tensor([[1.0, 0.0]], dtype=dtype)
    assert torch.equal(linear(x)[0], codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_rounded_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    weight = (torch.randn(5000, 40) * torch.logspace(-5, 2, 5000)[:, None]).to(dtype)
    codes, scale = quantize_rows(weight, row_magnitudes(weight))
    error = (dequantize_rows(codes, scale) - weight.float()).abs()
    # The scale is rounded to bfloat16, too, so the largest code may lie a little below the largest
    # value.
    slack = 127 * torch.finfo(dtype).eps
    assert (error <= scale.float()[:, None] * (0.5 + slack)).all()
    assert (codes.abs().amax(1) >= 126).all()


def test_parts_of_a_row_have_the_codes_of_the_whole() -> None:
    weight = torch.randn(30, 64)
    magnitudes = row_magnitudes(weight)
    codes, scale = quantize_rows(weight, magnitudes)
    for part in (slice(0, 20), slice(20, 64)):
        of_part = quantize_rows(weight[:, part], magnitudes)
        assert torch.equal(of_part[0], codes[:, part])
        assert torch.equal(of_part[1], scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_damaged_row_gives_no_numbers(backend: str, value: float) -> None:
    weight = torch.randn(40, 8)
    weight[3, 2] = value
    y = ops.Int8Linear(weight)(torch.randn(2, 8))
    assert not y[:, 3].isfinite().any()
    assert y[:, [*range(3), *range(4, 40)]].isfinite().all()


def test_a_weight_of_zeros(backend: str) -> None:
    bias = torch.randn(40)
    y = ops.Int8Linear(torch.zeros(40, 8), bias)(torch.randn(2, 8))
    assert torch.equal(y, bias.expand(2, -1))
