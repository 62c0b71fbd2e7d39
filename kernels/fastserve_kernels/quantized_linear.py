"""Linear layers for inference, with weights of few bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastserve_kernels.linear import PackedLinear
from fastserve_kernels.quantized_weight import QuantizedWeight


class QuantizedLinear:
    """y = x @ W.T + bias, optionally with a ReLU. W is some weights, one below the other, which may
    be in different formats, or not quantized.

    Each weight is widened to x's dtype, rounded as `QuantizedWeight.dequantized` rounds it, and
    then multiplied. So results are those of a `PackedLinear` with the dequantized weights.

    `path` tells what runs:

    - "torch": the weights are dequantized here, and take the memory that this takes.
    """

    def __init__(
        self,
        weights: Sequence[QuantizedWeight | Tensor],
        bias: Tensor | None = None,
        relu: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            weights: [out, in] each, with the same `in`; tensors are of `dtype` and on `device`.
            bias: [sum of all out] of `dtype`, on `device`, or None.
            dtype: of x and y.
        """
        self.path = "torch"
        whole = torch.cat(
            [
                one.to(device).dequantized(dtype) if isinstance(one, QuantizedWeight) else one
                for one in weights
            ]
        )
        self._table = whole
        self._packed = PackedLinear(whole, bias, relu)
        self.out_features, self.in_features = whole.shape

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of `dtype` -> [T, out], contiguous. T may be 0."""
        return self._packed(x)

    def rows(self, ids: Tensor) -> Tensor:
        """Dequantized rows of W, as an embedding looks them up: ids int64 [T] -> [T, in]."""
        return self._table[ids]
