"""Linear layers of one shape that multiply different rows: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_kernels.backend import compiled_for, uses_triton
from fastserve_kernels.cpu.grouped_weights import CompiledInt8Weights, CompiledWeights
from fastserve_kernels.quantized_weight import QuantizedWeight, stacked
from fastserve_kernels.weight_quantization import quantize_rows, row_magnitudes

_Weights = Sequence[QuantizedWeight | Tensor]


class GroupedLinear:
    """y[i] = x[rows[i]] @ weight[g].T + bias[g] for the rows i of each group g.

    Load each group's weight once, then call it. Only a packed copy of the weights is kept. With
    `int8` they are rounded as those of `Int8Linear`. With few rows, only the weights of groups with
    rows are read. `path` tells what runs:

    - "compiled": this package's kernel, float32 and bfloat16 on a CPU. Results do not depend on the
      number of rows in a call, bit for bit. Weights of few bits keep them in memory, and each
      group's results are those of its own `QuantizedLinear`, bit for bit.
    - "triton": a kernel in the Triton language, on a GPU. It never waits for the device, and a CUDA
      graph can capture it. Weights take 4 or 8 bits, and what groups of columns share, if those of
      all groups have one layout. For many rows they are dequantized in each call.
    - "torch": a product for each group, in plain torch, for everything else.

    Other weights of few bits are dequantized when they are loaded. So are those whose columns are
    in an order of their own, as all groups have the same x.
    """

    def __init__(
        self,
        groups: int,
        out_features: int,
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
    ) -> None:
        empty = torch.empty(0, dtype=dtype, device=device)
        biases = empty.new_empty(groups, out_features) if bias else None
        self._biases = biases
        self._weights: GroupedWeights
        shape = groups, out_features, in_features
        if uses_triton(device):
            # Imported on use: it needs Triton, which only a GPU needs.
            from fastserve_kernels.gpu.grouped_weights import GPUWeights

            self.path = "triton"
            self._weights = GPUWeights(shape, dtype, device, biases, int8=int8)
        elif (kernels := compiled_for(empty)) is not None:
            self.path = "compiled"
            kind = CompiledInt8Weights if int8 else CompiledWeights
            self._weights = kind(kernels, shape, dtype, biases)
        else:
            self.path = "torch"
            self._weights = _PlainWeights(shape, dtype, device, biases, int8=int8)

    @property
    def nbytes(self) -> int:
        """Memory of the weights, in bytes."""
        return self._weights.nbytes

    def load(self, group: int, weights: _Weights, bias: Tensor | None = None) -> None:
        """Pack one group's weight.

        Args:
            weights: [out, in] each, of any floating dtype and device, or in few bits. They are one
                below the other, and have the layer's out features together.
            bias: [out], of any floating dtype and device.
        """
        if self._biases is not None:
            assert bias is not None
            self._biases[group] = bias
        self._weights.load(group, weights)

    def __call__(self, x: Tensor, starts: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [N, in] of the layers' dtype -> y [R, out], contiguous.

        starts: int32 [groups + 1], contiguous. The rows of y from starts[g] up to starts[g + 1] are
            group g's. Those from starts[-1] on are undefined.
        rows: int32 [R], contiguous, the row of x for each row of y; None: the one with its number.
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        return self._weights.multiply(x, starts, rows)


class GroupedWeights(Protocol):
    """The weights of a `GroupedLinear`, which also adds its biases."""

    @property
    def nbytes(self) -> int: ...

    def load(self, group: int, weights: _Weights) -> None: ...

    def multiply(self, x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
        """x: rows contiguous."""
        ...


class _PlainWeights:
    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        biases: Tensor | None,
        *,
        int8: bool,
    ) -> None:
        """shape: groups, out features, in features."""
        self._dtype, self._biases = dtype, biases
        self._weights = torch.empty(shape, dtype=torch.int8 if int8 else dtype, device=device)
        self._scales = torch.empty(shape[:2], device=device) if int8 else None

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def load(self, group: int, weights: _Weights) -> None:
        weight = stacked(weights, self._dtype, self._weights.device)
        if self._scales is not None:
            weight, self._scales[group] = quantize_rows(weight, row_magnitudes(weight))
        self._weights[group] = weight

    def multiply(self, x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
        if rows is not None:
            x = x[rows.long()]
        y = x.new_zeros(len(x), self._weights.shape[1])
        for group, (start, end) in enumerate(pairwise(starts.tolist())):
            if start < end:
                y[start:end] = self._product(group, x[start:end])
        return y

    def _product(self, group: int, x: Tensor) -> Tensor:
        bias = None if self._biases is None else self._biases[group]
        if self._scales is None:
            return F.linear(x, self._weights[group], bias)
        y = F.linear(x.float(), self._weights[group].float()).mul_(self._scales[group])
        if bias is not None:
            y += bias.float()
        return y.to(x.dtype)
