"""Linears with a weight in INT8 against their reference: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from case_shapes import but_dtype, size_of_linear
from fastserve_kernels import ops
from kernel_cases import Case
from linear_cases import cases
from triton import knobs


def test_rows_whose_elements_are_apart(kernel_device: torch.device) -> None:
    torch.manual_seed(0)
    linear = ops.Int8Linear(torch.randn(40, 24).to(kernel_device))
    x = torch.randn(24, 5)
    apart, together = x.to(kernel_device).t(), x.t().contiguous().to(kernel_device)
    assert torch.equal(linear(apart).cpu(), linear(together).cpu())


# Compiling takes a second, and what follows a product is the same for all sizes. The interpreter
# runs it with each size.
# `make test` has all cases on an emulated GPU.
@pytest.mark.one_of(
    "case",
    key=but_dtype if knobs.runtime.interpret else size_of_linear,
    every=3 if knobs.runtime.interpret else 1,
)
@pytest.mark.parametrize("case", list(cases(interpreted=knobs.runtime.interpret)), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what
