"""Linear layers for inference, with weights in INT8."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_kernels.backend import compiled_for, uses_triton
from fastserve_kernels.weight_quantization import quantize_rows, row_magnitudes


class Int8Linear:
    """y = x @ weight.T + bias, optionally with a ReLU, with the weight rounded to INT8
    (`weight_quantization`), so that an element of the weight takes one byte to read.

    Products have x's own type and sums are in float32, so x is not rounded. `path` tells what runs:

    - "compiled": this package's kernel, float32 and bfloat16 on a CPU. Results do not depend on the
      number of rows in a call, bit for bit.
    - "triton": a kernel in the Triton language, on a GPU.
    - "torch": plain torch in float32, for everything else. It widens the weight in each call, and
      takes many times as long as `PackedLinear`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        relu: bool = False,
        magnitudes: Tensor | None = None,
    ) -> None:
        """
        Args:
            weight: [out, in].
            bias: [out] of the same dtype and device, or None.
            magnitudes: [out], the largest magnitudes of whole rows, if weight has only some of
                their columns; None: it has all.
        """
        weight = weight.detach()
        bias = None if bias is None else bias.detach().contiguous()
        self.out_features, self.in_features = weight.shape
        codes, scale = quantize_rows(
            weight, row_magnitudes(weight) if magnitudes is None else magnitudes
        )
        self.path, self._apply = _choose(weight, codes, scale, bias, relu)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of the weight's dtype -> [T, out], contiguous. T may be 0."""
        return self._apply(x)


def _choose(
    weight: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, relu: bool
) -> tuple[str, Callable[[Tensor], Tensor]]:
    if uses_triton(weight.device):
        return "triton", _on_gpu(weight.dtype, codes, scale, bias, relu)
    kernels = compiled_for(weight)
    if kernels is None:
        return "torch", _plain(codes, scale, bias, relu)
    panels = kernels.pack_int8_weight(codes, weight.dtype)
    out_features = weight.shape[0]

    def apply(x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        return kernels.int8_linear(x, panels, scale, bias, out_features, relu)

    return "compiled", apply


def _on_gpu(
    dtype: torch.dtype, codes: Tensor, scale: Tensor, bias: Tensor | None, relu: bool
) -> Callable[[Tensor], Tensor]:
    from fastserve_kernels.gpu.int8_linear import int8_linear, variants

    def apply(x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.clone(memory_format=torch.contiguous_format)
        return int8_linear(x, codes, scale, bias, relu)

    # Compile now, so that serving does not wait for it.
    for rows in variants(dtype, codes.device):
        apply(torch.zeros(rows, codes.shape[1], dtype=dtype, device=codes.device))
    return apply


def _plain(
    codes: Tensor, scale: Tensor, bias: Tensor | None, relu: bool
) -> Callable[[Tensor], Tensor]:
    wide_scale = scale.float()
    wide_bias = None if bias is None else bias.float()

    def apply(x: Tensor) -> Tensor:
        y = F.linear(x.float(), codes.float()).mul_(wide_scale)
        if wide_bias is not None:
            y += wide_bias
        if relu:
            y.relu_()
        return y.to(x.dtype)

    return apply
