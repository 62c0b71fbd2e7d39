"""Row-wise, cache and INT8 kernels against their references: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from rowwise_cases import Case, cases


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    compared = 0
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what
        compared += 1
    assert compared
