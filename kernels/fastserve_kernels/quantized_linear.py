"""Linear layers for inference, with weights of few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastserve_kernels.backend import compiled_for, uses_triton
from fastserve_kernels.cpu.compiled import CompiledKernels
from fastserve_kernels.cpu.quantized_panels import pack
from fastserve_kernels.linear import PackedLinear
from fastserve_kernels.quantized_weight import QuantizedWeight

_Weights = Sequence[QuantizedWeight | Tensor]


class QuantizedLinear:
    """y = x @ W.T + bias, optionally with a ReLU. W is some weights, one below the other, which may
    be in different formats, or not quantized.

    Each weight is widened to x's dtype, rounded as `QuantizedWeight.dequantized` rounds it, and
    then multiplied. So results are those of a `PackedLinear` with the dequantized weights, unless
    `rounds_rows`.

    `path` tells what runs:

    - "compiled": this package's kernel, float32 and bfloat16 on a CPU. Weights keep their few bits
      in memory. Results are those of `PackedLinear` bit for bit, at any number of rows, unless
      `rounds_rows`.
    - "triton": a kernel in the Triton language, on a GPU. Weights take 4 or 8 bits, and what groups
      of them share. For many rows they are dequantized in each call.
    - "torch": everywhere else, the weights are dequantized here, and take the memory that this
      takes.
    """

    def __init__(
        self,
        weights: _Weights,
        bias: Tensor | None = None,
        relu: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            weights: [out, in] each, with the same `in`, whose columns are in x's order; tensors are
                of `dtype` and on `device`.
            bias: [sum of all out] of `dtype`, on `device`, or None.
            dtype: of x and y.
        """
        bias = None if bias is None else bias.detach().contiguous()
        self.out_features = sum(weight.shape[0] for weight in weights)
        self.in_features = weights[0].shape[1]
        self.nbytes: int
        """Memory of the weights, in bytes."""
        self.rounds_rows = False
        """Whether rows of x are rounded to 8 bits, with a scale for each 64 neighbours, or 32 if a
        group of a weight is no multiple of 64, and then multiplied with exact weights. A CPU with
        VNNI, and without AMX, does so for bfloat16, if no weight is plain or FP8, and groups have a
        multiple of 32 columns, or all."""
        self._apply: Callable[[Tensor], Tensor]
        self._rows: Callable[[Tensor, int | None], Tensor]
        if uses_triton(device):
            self.path = "triton"
            self._load(weights, bias, relu, dtype, device)
            return
        kernels = compiled_for(torch.empty(0, dtype=dtype, device=device))
        if kernels is None:
            self.path = "torch"
            self._dequantize(weights, bias, relu, dtype, device)
        else:
            self.path = "compiled"
            self._pack(kernels, weights, bias, relu, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of `dtype` -> [T, out], contiguous. T may be 0."""
        return self._apply(x)

    def rows(self, ids: Tensor, first: int | None = None) -> Tensor:
        """Dequantized rows of W, as an embedding looks them up: ids int64 [T] -> [T, in].

        first: the id of the first row. Ids of no row give zeros. None: all ids are those of rows,
            from 0 on.
        """
        return self._rows(ids, first)

    def _pack(
        self,
        kernels: CompiledKernels,
        weights: _Weights,
        bias: Tensor | None,
        relu: bool,
        dtype: torch.dtype,
    ) -> None:
        panels = pack(kernels, weights, dtype)
        self.nbytes = panels.nbytes
        self.rounds_rows = kernels.rounds_rows(panels.pieces, self.in_features, dtype)

        def apply(x: Tensor) -> Tensor:
            if x.stride(1) != 1:
                x = x.contiguous()
            return kernels.quantized_linear(x, panels.pieces, bias, self.out_features, relu)

        def rows(ids: Tensor, first: int | None) -> Tensor:
            return kernels.quantized_rows(
                panels.pieces, ids.contiguous(), self.in_features, dtype, first or 0
            )

        self._apply, self._rows = apply, rows

    def _load(
        self,
        weights: _Weights,
        bias: Tensor | None,
        relu: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Imported on use: it needs Triton, which only a GPU needs.
        from fastserve_kernels.gpu.quantized_layer import QuantizedLayer

        layer = QuantizedLayer(weights, bias, relu, dtype, device)
        self.nbytes = layer.nbytes
        self._apply, self._rows = layer, partial(_rows_or_zeros, layer.rows, self.out_features)

    def _dequantize(
        self,
        weights: _Weights,
        bias: Tensor | None,
        relu: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        table = torch.cat(
            [
                one.to(device).dequantized(dtype) if isinstance(one, QuantizedWeight) else one
                for one in weights
            ]
        )
        packed = PackedLinear(table, bias, relu)
        # The table is kept for `rows` beside its packed form, unless the device uses it as it is.
        self.nbytes = table.nbytes * (2 if packed.path == "onednn" else 1)
        self._apply = packed
        self._rows = partial(_rows_or_zeros, table.__getitem__, self.out_features)


def _rows_or_zeros(
    look_up: Callable[[Tensor], Tensor], num_rows: int, ids: Tensor, first: int | None
) -> Tensor:
    if first is None:
        return look_up(ids)
    own = ids - first
    absent = (own < 0) | (own >= num_rows)
    return look_up(own.masked_fill_(absent, 0)).masked_fill_(absent[:, None], 0)
