"""Kernels of a mixture's experts against their references: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from case_shapes import but_dtype
from experts_cases import cases
from kernel_cases import Case
from triton import knobs


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter computes with NumPy, which warns
@pytest.mark.one_of("case", key=but_dtype)
@pytest.mark.parametrize("case", list(cases(interpreted=knobs.runtime.interpret)), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what
