from __future__ import annotations

import pytest
import torch
from fastserve_kernels.weight_quantization import quantize_groups

EPS = torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [16, 64])
def test_a_weight_is_rounded_by_half_a_scale_at_most(dtype: torch.dtype, group: int) -> None:
    weight = (torch.randn(5000, 128) * torch.logspace(-4, 2, 5000)[:, None]).to(dtype)
    rounded = quantize_groups(weight, bits=4, group=group)
    error = (rounded.dequantized(torch.float32) - weight.float()).abs().unflatten(1, (-1, group))
    scales = rounded.scales.numbers()
    assert rounded.offsets is not None
    # The largest code may lie a little below the largest number, for scale and offset are rounded.
    slack = EPS * (15 * scales + rounded.offsets.numbers().abs())
    assert (error <= (scales / 2 + slack)[..., None]).all()
    assert (rounded.codes.unflatten(1, (-1, group)).amax(2) >= 14).all()
    assert (rounded.codes.unflatten(1, (-1, group)).amin(2) == 0).all()


def test_groups_of_equal_numbers_stay_exact() -> None:
    weight = torch.tensor([0.0, -3.0, 0.5, 7.0]).repeat_interleave(32)[None]
    rounded = quantize_groups(weight, bits=4, group=32)
    assert torch.equal(rounded.dequantized(torch.float32), weight)
