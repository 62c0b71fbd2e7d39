from __future__ import annotations

import pytest
import torch
from fastserve_kernels.group_quantization import quantize_groups


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_within_half_a_scale(bits: int) -> None:
    weight = torch.randn(5000, 128) * torch.logspace(-3, 2, 5000)[:, None]
    quantized, error = quantize_groups(weight, bits, group=64)
    values = quantized.dequantized(torch.float32)
    scales = quantized.scales.numbers().repeat_interleave(64, 1)
    # Numbers are rounded to float16: offsets by up to half of their last bit, and so are the scales.
    slack = weight.unflatten(1, (-1, 64)).abs().amax(2).repeat_interleave(64, 1) * 2**-9
    assert ((values - weight).abs() <= scales / 2 + slack).all()
    assert error == pytest.approx(float((values - weight).norm() / weight.norm()), rel=1e-4)
    assert quantized.format == f"int{bits}"


def test_the_error_of_normal_values() -> None:
    _, error = quantize_groups(torch.randn(64, 1024))
    assert 0.08 < error < 0.1


def test_groups_of_one_value_are_exact() -> None:
    weight = torch.tensor([[0.0], [0.5], [-2.0]]).expand(-1, 64)
    quantized, error = quantize_groups(weight)
    assert torch.equal(quantized.dequantized(torch.float32), weight)
    assert error == 0.0
