"""The weights of a `GroupedLinear` for the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_kernels.cpu.compiled import CompiledKernels
from fastserve_kernels.cpu.quantized_panels import PIECE_SIZE, pack
from fastserve_kernels.quantized_weight import QuantizedWeight, in_few_bits, stacked
from fastserve_kernels.weight_quantization import quantize_rows, row_magnitudes

_CPU = torch.device("cpu")
_Weights = Sequence[QuantizedWeight | Tensor]


class CompiledWeights:
    """Weights of few bits, and others in the product's dtype. Each group has memory of its own, as
    other formats have other sizes."""

    def __init__(
        self,
        kernels: CompiledKernels,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        biases: Tensor | None,
    ) -> None:
        """shape: groups, out features, in features."""
        self._kernels, self._dtype, self._biases = kernels, dtype, biases
        groups, self._out_features, _ = shape
        self._panels: list[tuple[Tensor, ...]] = [()] * groups
        self._pieces = torch.zeros(groups, 1, PIECE_SIZE, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for panels in self._panels for one in panels)

    def load(self, group: int, weights: _Weights) -> None:
        kept: _Weights | None = in_few_bits(weights)
        if kept is None:
            kept = [stacked(weights, self._dtype, _CPU)]
        packed = pack(self._kernels, kept, self._dtype)
        more = len(packed.pieces) - self._pieces.shape[1]
        if more > 0:
            self._pieces = F.pad(self._pieces, (0, 0, 0, more))
        self._pieces[group, : len(packed.pieces)] = packed.pieces
        self._panels[group] = packed.panels

    def multiply(self, x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
        return self._kernels.grouped_linear(
            x, starts, rows, self._pieces, self._biases, self._out_features
        )


class CompiledInt8Weights:
    """Weights that are rounded to INT8."""

    def __init__(
        self,
        kernels: CompiledKernels,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        biases: Tensor | None,
    ) -> None:
        """shape: groups, out features, in features."""
        self._kernels, self._dtype, self._biases = kernels, dtype, biases
        size = kernels.packed_size(*shape[1:], dtype)
        self._panels = torch.empty(shape[0], size, dtype=torch.int8)
        self._scales = torch.empty(shape[:2], dtype=dtype)

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes + self._scales.nbytes

    def load(self, group: int, weights: _Weights) -> None:
        weight = stacked(weights, self._dtype, _CPU)
        codes, self._scales[group] = quantize_rows(weight, row_magnitudes(weight))
        self._kernels.pack_int8_weight(codes, self._dtype, self._panels[group])

    def multiply(self, x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
        return self._kernels.grouped_int8_linear(
            x, starts, rows, self._panels, self._scales, self._biases
        )
