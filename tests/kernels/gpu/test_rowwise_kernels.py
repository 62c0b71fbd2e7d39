"""Row-wise, cache and INT8 kernels against their references: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from fastserve_kernels import kv_quantization
from fastserve_kernels.gpu import activations, kv_int8, norms
from rowwise_cases import Case, cases


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    compared = 0
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what
        compared += 1
    assert compared


def test_relu_lets_nan_through(kernel_device: torch.device) -> None:
    x = torch.tensor([[float("nan"), -1.0, -0.5, 2.0, float("inf"), -float("inf")]])
    bias = torch.full((6,), 0.75, device=kernel_device)
    result = x.clone().to(kernel_device)
    activations.bias_relu(result, bias)
    torch.testing.assert_close(result.cpu(), (x + 0.75).relu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:overflow")  # of NumPy, by which the interpreter computes
def test_silu_mul_of_extremes(kernel_device: torch.device) -> None:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]])
    out = activations.silu_mul(torch.cat([gate, torch.ones(1, 6)], dim=1).to(kernel_device))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 1e30]])
    torch.testing.assert_close(out.cpu(), expected)


def test_constant_rows_normalise_to_the_bias(kernel_device: torch.device) -> None:
    x = torch.full((2, 100), 5.0, device=kernel_device)
    bias = torch.full((100,), 0.5, device=kernel_device)
    _, normed = norms.add_layer_norm(x, x, None, bias, 1e-5)
    torch.testing.assert_close(normed.cpu(), torch.full((2, 100), 0.5))


@pytest.mark.parametrize("value", [0.0, 1e-30, 50.01, -70_000.0, 1e30])
def test_int8_of_channels_that_float16_does_not_hold(
    value: float, kernel_device: torch.device
) -> None:
    """A constant, beside it a channel that spreads as far."""
    kv = torch.full((1, 1, 2, 1, 16, 16), value)
    kv[..., 1] = torch.linspace(-1, 1, 16) * value
    block_ids = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    codes, parameters = kv_int8.quantize_blocks(kv.to(kernel_device), block_ids, 16)
    expected = kv_quantization.quantize(kv, 16)
    assert torch.equal(codes.cpu(), expected[0])
    assert torch.equal(parameters.cpu(), expected[1])
