"""A linear layer of some weights in different formats, one below the other, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fastserve_kernels.gpu.dense_linear import dense_linear
from fastserve_kernels.gpu.packed_weight import Layout, PackedWeight
from fastserve_kernels.gpu.quantized_linear import quantized_linear, variants
from fastserve_kernels.quantized_weight import QuantizedWeight


class QuantizedLayer:
    """See `QuantizedLinear`. Neighbouring weights of one layout share a launch. Those without a
    layout are dequantized when they are loaded."""

    def __init__(
        self,
        weights: Sequence[QuantizedWeight | Tensor],
        bias: Tensor | None,
        relu: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dtype = dtype
        self._pieces: list[_Piece] = []
        """Their rows of W follow each other."""
        start = 0
        for weight, order in _merged(weights, dtype, device):
            size = weight.out_features if isinstance(weight, PackedWeight) else len(weight)
            of_piece = None if bias is None else bias[start : start + size]
            place = range(start, start + size)
            self._pieces.append(_Piece(weight, order, of_piece, relu, place))
            start += size
        self._out_features = start
        self._in_features = weights[0].shape[1]
        # Compile now, so that serving does not wait for it.
        for count in variants(dtype, device):
            self(torch.zeros(count, self._in_features, dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        return sum(piece.weight.nbytes for piece in self._pieces)

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.clone(memory_format=torch.contiguous_format)
        y = torch.empty((len(x), self._out_features), dtype=x.dtype, device=x.device)
        if len(x) > 0:
            for piece in self._pieces:
                piece.multiply(x, y[:, piece.place.start : piece.place.stop])
        return y

    def rows(self, ids: Tensor) -> Tensor:
        if len(self._pieces) == 1:
            return self._pieces[0].rows(ids, self._dtype)
        y = torch.empty((len(ids), self._in_features), dtype=self._dtype, device=ids.device)
        for piece in self._pieces:
            start, size = piece.place.start, len(piece.place)
            found = piece.rows((ids - start).clamp(0, size - 1), self._dtype)
            y = torch.where((ids >= start)[:, None], found, y)
        return y


@dataclass(frozen=True)
class _Piece:
    weight: PackedWeight | Tensor
    order: Tensor | None
    """See `QuantizedWeight.order`."""
    bias: Tensor | None
    relu: bool
    place: range
    """Its rows of W."""

    def multiply(self, x: Tensor, y: Tensor) -> None:
        """y [T, rows of the piece], T > 0."""
        if isinstance(self.weight, PackedWeight):
            if self.order is not None:
                x = x.index_select(1, self.order)
            quantized_linear(x, self.weight, self.bias, self.relu, y)
        else:
            dense_linear(x, self.weight, self.bias, y)
            if self.relu:
                y.relu_()

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if not isinstance(self.weight, PackedWeight):
            return self.weight[ids]
        found = self.weight.dequantized(dtype, ids)
        return found if self.order is None else found.index_select(1, self.order.argsort())


def _merged(
    weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[PackedWeight | Tensor, Tensor | None]]:
    """Weights, and the orders of their columns. A weight with an order is merged with no other."""
    for (layout, _), group in groupby(weights, _mergeable):
        if layout is None:
            for weight in group:
                if isinstance(weight, QuantizedWeight):
                    weight = weight.to(device).dequantized(dtype)
                yield weight, None
        else:
            some = [weight for weight in group if isinstance(weight, QuantizedWeight)]
            order = some[0].order
            packed = PackedWeight.of(some, layout, device)
            yield packed, None if order is None else order.to(device)


def _mergeable(weight: QuantizedWeight | Tensor) -> tuple[Layout | None, int | None]:
    """Equal for weights that one launch can multiply by."""
    if not isinstance(weight, QuantizedWeight):
        return None, None
    return Layout.of(weight), None if weight.order is None else id(weight)
