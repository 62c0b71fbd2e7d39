"""Linears with weights of few bits against their reference: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from case_shapes import but_dtype
from fastserve_kernels import ops
from fastserve_kernels.gpu.packed_weight import Layout, PackedWeight
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight
from kernel_cases import Case
from quantized_cases import cases
from triton import knobs


@pytest.mark.one_of("case", key=but_dtype)
@pytest.mark.parametrize("case", list(cases(interpreted=knobs.runtime.interpret)), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what


def test_rows_from_anywhere_are_widened(kernel_device: torch.device) -> None:
    """The last tile has rows past the end, whose numbers must not be read."""
    numbers = [GroupNumbers(torch.rand(128, 2).bfloat16()) for _ in range(2)]
    codes = torch.randint(0, 16, (128, 128)).to(torch.uint8)
    weight = QuantizedWeight("INT4", codes, 4, 64, *numbers)
    layout = Layout.of(weight)
    assert layout is not None
    packed = PackedWeight.of([weight], layout, kernel_device)
    found = packed.dequantized(torch.float32, slice(100, 128))
    torch.testing.assert_close(found.cpu(), weight.dequantized(torch.float32)[100:])


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_is_dequantized_exactly(bits: int, kernel_device: torch.device) -> None:
    codes = torch.arange(2**bits).to(torch.uint8).repeat(4)[None, :]
    scales = GroupNumbers(torch.tensor([[0.01]]))
    weight = QuantizedWeight("codes", codes, bits, codes.shape[1], scales, center=3)
    layer = ops.QuantizedLinear([weight], dtype=torch.float32, device=kernel_device)
    found = layer.rows(torch.zeros(1, dtype=torch.int64).to(kernel_device))
    torch.testing.assert_close(found.cpu(), weight.dequantized(torch.float32), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["4 bits", "6 bits", "8 bits", "float8"])
@pytest.mark.parametrize("rows", [16, 17])
def test_every_code_is_multiplied_exactly(
    kind: str, rows: int, kernel_device: torch.device
) -> None:
    """Rows of x choose columns of the weight, in which every code is."""
    dtype = torch.float16 if knobs.runtime.interpret else torch.bfloat16
    bits = 8 if kind == "float8" else int(kind[0])
    codes = torch.arange(256)[None, :] + 2 * torch.arange(128)[:, None]
    codes = (codes % 2**bits).to(torch.uint8)
    if kind == "float8":
        codes = codes.masked_fill(codes % 128 == 127, 0).view(torch.float8_e4m3fn)  # no NaN
    center = 0 if kind == "float8" else 2 ** (bits - 1)
    scales = GroupNumbers(torch.ones(128, 8))
    weight = QuantizedWeight("codes", codes, bits, 32, scales, center=center)
    columns = torch.arange(rows) * 13
    x = torch.nn.functional.one_hot(columns, 256).to(dtype)
    layer = ops.QuantizedLinear([weight], dtype=dtype, device=kernel_device)
    y = layer(x.to(kernel_device)).cpu()
    assert torch.equal(y, weight.dequantized(dtype)[:, columns].t())


def test_float8_has_the_values_of_torch(kernel_device: torch.device) -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    codes = codes[:, :127].contiguous()  # the last of each row is NaN
    weight = QuantizedWeight("FP8", codes, 8, 127, GroupNumbers(torch.ones(2, 1)))
    layer = ops.QuantizedLinear([weight], dtype=torch.float32, device=kernel_device)
    found = layer.rows(torch.arange(2).to(kernel_device)).cpu()
    assert torch.equal(found, codes.float())


def test_nan_in_float8_gives_no_numbers(kernel_device: torch.device) -> None:
    codes = torch.ones(3, 32).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[1, 5] = 0xFF
    weight = QuantizedWeight("FP8", codes, 8, 32, GroupNumbers(torch.ones(3, 1)))
    layer = ops.QuantizedLinear([weight], dtype=torch.float32, device=kernel_device)
    y = layer(torch.ones(2, 32).to(kernel_device)).cpu()
    assert y[:, 1].isnan().all()
    assert torch.equal(y[:, [0, 2]], torch.full((2, 2), 32.0))
