"""Kernels of a mixture's experts against their references: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from case_shapes import but_dtype
from experts_cases import cases
from fastserve_kernels import ops
from kernel_cases import Case
from quantized_cases import LAYERS
from triton import knobs


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter computes with NumPy, which warns
@pytest.mark.one_of("case", key=but_dtype)
@pytest.mark.parametrize("case", list(cases(interpreted=knobs.runtime.interpret)), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what


@pytest.mark.parametrize(
    ("name", "bits", "num_groups"),
    [
        ("Q4_1 in parts", 4 + 32 / 32, 4),
        ("Q6_K", 8 + 32 / 16, 64),  # so many that all rows fill whole tiles
        ("a mixture", 16, 4),
    ],
)
def test_few_bits_stay_in_memory(
    name: str, bits: float, num_groups: int, kernel_device: torch.device
) -> None:
    """If all weights of all groups have one layout."""
    _, parts, _, _ = next(layer for layer in LAYERS if layer[0] == name)
    out = sum(count for _, count in parts)
    linear = ops.GroupedLinear(
        num_groups, out, 256, bias=False, dtype=torch.float16, device=kernel_device
    )
    for group in range(num_groups):
        linear.load(group, [make(count, 256) for make, count in parts])
    assert linear.nbytes == num_groups * out * 256 * bits / 8
