"""Row-wise, cache and INT8 kernels against their references: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from case_shapes import but_dtype
from fastserve_kernels import kv_quantization
from fastserve_kernels.gpu import activations, kv_int8
from rowwise_cases import Case, cases
from triton import knobs


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter computes with NumPy, which warns
# `make test` has all cases on an emulated GPU, in bfloat16.
@pytest.mark.one_of("case", key=but_dtype, every=3 if knobs.runtime.interpret else 1)
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


@pytest.mark.parametrize("value", [0.0, 1e-30, 50.01, -70_000.0, 1e30])
def test_int8_of_channels_that_float16_does_not_hold(
    value: float, kernel_device: torch.device
) -> None:
    """One channel is constant, another has values just as large."""
    kv = torch.full((1, 1, 2, 1, 16, 16), value)
    kv[..., 1] = torch.linspace(-1, 1, 16) * value
    check_int8(kv, kernel_device)


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_int8_of_values_between_two_codes(ulps: int, kernel_device: torch.device) -> None:
    """Values at or next to each half step, in channels of many scales."""
    torch.manual_seed(0)
    scale = (torch.rand(64) + 0.1).half().float()
    steps = torch.arange(512).view(8, 1, 1, 1, 64, 1) / 2
    kv = (steps * scale).expand(8, 1, 2, 1, 64, 64).contiguous()
    if ulps:
        kv = kv.nextafter(torch.tensor(ulps * torch.inf))
    kv[..., 0, :], kv[..., 1, :] = 0.0, 255 * scale
    check_int8(kv, kernel_device)


def check_int8(kv: torch.Tensor, device: torch.device) -> None:
    """Checks that codes and parameters of all blocks are those of a CPU."""
    block_ids = torch.arange(len(kv), dtype=torch.int32, device=device)
    results = kv_int8.quantize_blocks(kv.to(device), block_ids, kv.shape[4])
    for result, expected in zip(results, kv_quantization.quantize(kv, kv.shape[4]), strict=True):
        assert torch.equal(result.cpu(), expected)
