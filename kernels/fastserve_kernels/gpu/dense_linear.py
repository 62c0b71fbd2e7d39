"""Products with torch's own kernels, of weights that were widened in memory before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_PART_BYTES = 64 << 20


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = x @ weight.T + bias.

    y: [T, out] of x's dtype, rows contiguous. It may be some columns of a wider tensor.
    """
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def widened_linear(
    x: Tensor, widened: Callable[[slice], Tensor], bias: Tensor | None, relu: bool, y: Tensor
) -> None:
    """The same, optionally with a ReLU, with a weight that is widened for this product, a part at a
    time.

    widened: gives some rows of the weight, contiguous, of x's dtype.
    """
    out_features = y.shape[1]
    step = max(1, _PART_BYTES // max(1, x.shape[1] * x.element_size()))
    for start in range(0, out_features, step):
        rows = slice(start, min(start + step, out_features))
        dense_linear(x, widened(rows), None if bias is None else bias[rows], y[:, rows])
    if relu:
        y.relu_()
