"""Cases of linears with a weight in INT8, and of those with a ReLU in 16 bits, for a CPU's
implementations and a GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import kernel_reference as reference
import torch
from fastserve_kernels import ops
from fastserve_kernels.weight_quantization import rounded
from kernel_cases import DTYPES, NAN, Case, Comparison, near

# Rows, out features, in features: near tile sizes, larger, and no multiple of them.
SIZES = [
    (1, 64, 64), (3, 7, 33), (5, 96, 576), (16, 100, 256), (17, 40, 130), (64, 130, 96),
    (65, 33, 80), (140, 200, 64), (2, 30, 2100), (3, 40, 1),
    (385, 33, 80), (3, 40, 257), (2, 40, 0), (0, 64, 64),
]  # fmt: skip
RELU_SIZES = [(1, 64, 64), (17, 40, 130), (65, 33, 80), (0, 64, 64)]
"""Of linears with 16 bits, which torch multiplies, with a bias and a ReLU."""


def cases(*, interpreted: bool = False) -> Iterator[Case]:
    """If ``interpreted``, bfloat16 is left out: Triton's interpreter gets its products wrong."""
    for dtype in DTYPES:
        if interpreted and dtype == torch.bfloat16:
            continue
        for rows, out_features, in_features in SIZES:
            for extras in ("bias", "bias and ReLU", "none"):
                arguments = (dtype, rows, out_features, in_features, extras)
                yield Case("int8_linear", arguments, _int8_linear)
        if dtype != torch.float32:
            for size in RELU_SIZES:
                yield Case("packed_linear", (dtype, *size), _packed_linear)


def _packed_linear(
    dtype: torch.dtype, rows: int, out_features: int, in_features: int, device: torch.device
) -> Iterator[Comparison]:
    weight = (torch.randn(out_features, in_features) * 0.1).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    linear = ops.PackedLinear(weight.to(device), bias.to(device), relu=True)
    expected = reference.linear(x, weight, bias, relu=True)
    yield near("result", linear(x.to(device)).cpu(), expected, dtype)


def _int8_linear(
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    in_features: int,
    extras: str,
    device: torch.device,
) -> Iterator[Comparison]:
    weight = torch.randn(out_features, in_features) * torch.rand(out_features, 1) * 0.1
    weight[0] = 0.0
    weight = weight.to(dtype)
    bias = None if extras == "none" else torch.randn(out_features).to(dtype)
    wide = torch.full((rows, in_features + 16), NAN, dtype=dtype)  # rows with a gap between them
    wide[:, :in_features] = torch.randn(rows, in_features)
    x = wide[:, :in_features]
    linear = ops.Int8Linear(
        weight.to(device), None if bias is None else bias.to(device), extras == "bias and ReLU"
    )
    expected = reference.linear(x, rounded(weight), bias, extras == "bias and ReLU")
    yield near("result", linear(wide.to(device)[:, :in_features]).cpu(), expected, dtype)
