"""Linear layers of one shape that multiply different rows: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_kernels.backend import compiled_for, uses_triton
from fastserve_kernels.cpu.compiled import CompiledKernels
from fastserve_kernels.cpu.quantized_panels import PIECE_SIZE, pack
from fastserve_kernels.quantized_weight import QuantizedWeight
from fastserve_kernels.weight_quantization import quantize_rows, row_magnitudes

_Weights = Sequence[QuantizedWeight | Tensor]


class GroupedLinear:
    """y[i] = x[rows[i]] @ weight[g].T + bias[g] for the rows i of each group g.

    Load each group's weight, then call it. Only a packed copy of the weights is kept. With `int8`
    they are rounded as those of `Int8Linear`. With few rows, only the weights of groups with rows
    are read. `path` tells what runs:

    - "compiled": this package's kernel, float32 and bfloat16 on a CPU. Results do not depend on the
      number of rows in a call, bit for bit. Weights of few bits keep them in memory, and results
      are those of the dequantized weights, bit for bit.
    - "triton": a kernel in the Triton language, on a GPU. It never waits for the device, and a CUDA
      graph can capture it.
    - "torch": a product for each group, in plain torch, for everything else.

    On the last two paths weights of few bits are dequantized when they are loaded.
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
        self.out_features, self.in_features = out_features, in_features
        empty = torch.empty(0, dtype=dtype, device=device)
        self._dtype, self._device = dtype, device
        self._kernels: CompiledKernels | None = None
        if uses_triton(device):
            self.path = "triton"
        else:
            self._kernels = compiled_for(empty)
            self.path = "torch" if self._kernels is None else "compiled"
        # As `quantize_rows` has them.
        scale_dtype = torch.float32 if dtype == torch.float16 else dtype
        self._scales = empty.new_empty(groups, out_features, dtype=scale_dtype) if int8 else None
        self._biases = empty.new_empty(groups, out_features) if bias else None
        # Each group's packed weights, and what `CompiledKernels.grouped_linear` takes. They have
        # other sizes for other formats.
        self._panels: list[tuple[Tensor, ...]] = [()] * groups
        self._pieces = torch.zeros(groups, 1, PIECE_SIZE, dtype=torch.int64)
        shape: tuple[int, ...] = (out_features, in_features)
        if self._kernels is not None:
            size = self._kernels.packed_size(out_features, in_features, dtype)
            shape = (size if int8 else 0,)
        self._weights = empty.new_empty(groups, *shape, dtype=torch.int8 if int8 else dtype)
        self._apply = self._choose()

    @property
    def nbytes(self) -> int:
        """Memory of the weights, in bytes."""
        dense = [one for one in (self._weights, self._scales) if one is not None]
        return sum(one.nbytes for one in (*dense, *(p for of in self._panels for p in of)))

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
        if self._kernels is None or self._scales is not None:
            weights = [self._dequantized(weight) for weight in weights]
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(plain) < len(weights):
            self._keep(group, [self._packable(weight) for weight in weights])
            return
        weight = (plain[0] if len(plain) == 1 else torch.cat(plain)).to(self._device, self._dtype)
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        if self._scales is not None:
            weight, self._scales[group] = quantize_rows(weight, row_magnitudes(weight))
        if self._kernels is None:
            self._weights[group] = weight
        elif self._scales is None:
            self._keep(group, [weight])
        else:
            self._kernels.pack_int8_weight(weight, self._dtype, self._weights[group])

    def _dequantized(self, weight: QuantizedWeight | Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return weight.to(self._device).dequantized(self._dtype)

    def _packable(self, weight: QuantizedWeight | Tensor) -> QuantizedWeight | Tensor:
        """The same, with columns in x's order. All groups have the same x, so an order of their own
        cannot be kept."""
        if isinstance(weight, Tensor) or weight.order is not None:
            weight = self._dequantized(weight)
        return weight.to(self._dtype) if isinstance(weight, Tensor) else weight

    def _keep(self, group: int, weights: _Weights) -> None:
        assert self._kernels is not None
        packed = pack(self._kernels, weights, self._dtype)
        more = len(packed.pieces) - self._pieces.shape[1]
        if more > 0:
            self._pieces = F.pad(self._pieces, (0, 0, 0, more))
        self._pieces[group] = 0
        self._pieces[group, : len(packed.pieces)] = packed.pieces
        self._panels[group] = packed.panels

    def __call__(self, x: Tensor, starts: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [N, in] of the layers' dtype -> y [R, out], contiguous.

        starts: int32 [groups + 1], contiguous. The rows of y from starts[g] up to starts[g + 1] are
            group g's. Those from starts[-1] on are undefined.
        rows: int32 [R], contiguous, the row of x for each row of y; None: the one with its number.
        """
        return self._apply(x if x.stride(1) == 1 else x.contiguous(), starts, rows)

    def _choose(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        if self.path == "triton":
            return self._on_gpu()
        return self._plain if self._kernels is None else self._compiled

    def _compiled(self, x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
        assert self._kernels is not None
        if self._scales is not None:
            return self._kernels.grouped_int8_linear(
                x, starts, rows, self._weights, self._scales, self._biases
            )
        return self._kernels.grouped_linear(
            x, starts, rows, self._pieces, self._biases, self.out_features
        )

    def _on_gpu(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        from fastserve_kernels.gpu.grouped_linear import grouped_linear, variants

        def apply(x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
            return grouped_linear(x, starts, rows, self._weights, self._scales, self._biases)

        # Compile now, so that serving does not wait for it. No group has rows.
        groups, device = len(self._weights), self._weights.device
        starts = torch.zeros(groups + 1, dtype=torch.int32, device=device)
        for count in variants(groups, self._dtype, device):
            x = torch.zeros(count, self.in_features, dtype=self._dtype, device=device)
            apply(x, starts, None)
        return apply

    def _plain(self, x: Tensor, starts: Tensor, rows: Tensor | None) -> Tensor:
        if rows is not None:
            x = x[rows.long()]
        y = x.new_zeros(len(x), self.out_features)
        for group, (start, end) in enumerate(pairwise(starts.tolist())):
            if start < end:
                y[start:end] = self._product(group, x[start:end])
        return y

    def _product(self, group: int, x: Tensor) -> Tensor:
        bias = None if self._biases is None else self._biases[group]
        if self._scales is None:
            return F.linear(x, self._weights[group], bias)
        y = F.linear(x.float(), self._weights[group].float()).mul_(self._scales[group].float())
        if bias is not None:
            y += bias.float()
        return y.to(x.dtype)
