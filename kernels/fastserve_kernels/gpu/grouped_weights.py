"""The weights of a `GroupedLinear` on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastserve_kernels.gpu import grouped_linear as dense
from fastserve_kernels.gpu import grouped_quantized_linear as quantized
from fastserve_kernels.gpu.packed_weight import Layout, PackedWeight
from fastserve_kernels.quantized_weight import QuantizedWeight, in_few_bits, stacked
from fastserve_kernels.weight_quantization import quantize_rows, row_magnitudes


class GPUWeights:
    """Weights stay in few bits if those of all groups have one layout. Otherwise they are
    dequantized when the last group is loaded."""

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
        self._shape, self._dtype, self._device, self._int8 = shape, dtype, device, int8
        self._biases = biases
        self._waiting = shape[0]
        self._stored: dict[int, list[QuantizedWeight]] = {}
        """Those of few bits, until all groups are there."""
        self._packed: PackedWeight | None = None
        """Of all groups, one below the other."""
        self._weights = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
        self._scales: Tensor | None = None
        if int8:
            # As `quantize_rows` has them.
            scale_dtype = torch.float32 if dtype == torch.float16 else dtype
            self._scales = torch.empty(shape[:2], dtype=scale_dtype, device=device)

    @property
    def nbytes(self) -> int:
        scales = 0 if self._scales is None else self._scales.nbytes
        packed = 0 if self._packed is None else self._packed.nbytes
        return self._weights.nbytes + scales + packed

    def load(self, group: int, weights: Sequence[QuantizedWeight | Tensor]) -> None:
        few_bits = None if self._int8 else in_few_bits(weights)
        if few_bits is not None:
            self._stored[group] = few_bits
        else:
            self._load_dense(group, weights)
        self._waiting -= 1
        if self._waiting == 0:
            self._finish()

    def multiply(self, x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
        if self._packed is None:
            return dense.grouped_linear(x, starts, rows, self._weights, self._scales, self._biases)
        return quantized.grouped_quantized_linear(
            x, starts, rows, self._packed, self._biases, self._shape[0]
        )

    def _load_dense(self, group: int, weights: Sequence[QuantizedWeight | Tensor]) -> None:
        weight = stacked(weights, self._dtype, self._device)
        if self._scales is not None:
            weight, self._scales[group] = quantize_rows(weight, row_magnitudes(weight))
        if len(self._weights) == 0:
            self._weights = weight.new_empty(self._shape)
        self._weights[group] = weight

    def _finish(self) -> None:
        groups, _, in_features = self._shape
        ordered = [one for group in sorted(self._stored) for one in self._stored[group]]
        layout = _common_layout(ordered)
        if layout is not None and len(self._stored) == groups:
            self._packed = PackedWeight.of(ordered, layout, self._device)
        else:
            for group, weights in self._stored.items():
                self._load_dense(group, weights)
        self._stored.clear()
        # Compile now, so that serving does not wait for it. No group has rows.
        starts = torch.zeros(groups + 1, dtype=torch.int32, device=self._device)
        variants = dense.variants if self._packed is None else quantized.variants
        for count in variants(groups, self._dtype, self._device):
            x = torch.zeros(count, in_features, dtype=self._dtype, device=self._device)
            self.multiply(x, starts, None)


def _common_layout(weights: Sequence[QuantizedWeight]) -> Layout | None:
    """The layout for all of the weights; None if there is none."""
    layouts = {Layout.of(weight) for weight in weights}
    return layouts.pop() if len(layouts) == 1 else None
