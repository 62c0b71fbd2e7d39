"""Linears with a weight in INT8 against their reference: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Case
from linear_cases import cases
from triton import knobs


@pytest.mark.parametrize("case", list(cases(interpreted=knobs.runtime.interpret)), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what
