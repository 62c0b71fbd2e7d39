"""Linear layers for inference, with the weight packed once for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_kernels.backend import compiled_for, uses_triton

ONEDNN_ROWS_HINT = 16
"""oneDNN lays out the weight for so many rows. Measured in fp32 for 1 to 2048 rows: a layout for 16
or 256 suits every count; one for a single row loses up to 70% from 4 rows on."""


class PackedLinear:
    """y = x @ weight.T + bias, optionally with a ReLU, for inference.

    Only a packed copy of the weight is kept, or the given tensor if the device uses it as it is.
    `path` tells what runs:

    - "compiled": this package's kernel, float32 and bfloat16 on a CPU. Results do not depend on the
      number of rows in a call, bit for bit.
    - "onednn": oneDNN's prepacked kernels, without a C++ compiler: for float32, and for bfloat16 if
      the CPU has instructions for it.
    - "torch": `torch.nn.functional.linear`, for everything else. On a GPU a ReLU is fused with the
      bias, and in 16 bits both are with the product.

    The last two choose their method by the number of rows, so the last bits may depend on it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> None:
        """weight [out, in]; bias [out] of the same dtype and device, or None."""
        weight = weight.detach()
        bias = None if bias is None else bias.detach().contiguous()
        self.out_features, self.in_features = weight.shape
        self.path, self._apply = _choose(weight, bias, relu)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of the weight's dtype -> [T, out], contiguous. T may be 0."""
        return self._apply(x)


def _choose(
    weight: Tensor, bias: Tensor | None, relu: bool
) -> tuple[str, Callable[[Tensor], Tensor]]:
    if uses_triton(weight.device):
        return "torch", _on_gpu(weight, bias) if relu else _plain(weight, bias, relu=False)
    kernels = compiled_for(weight)
    if kernels is None:
        if weight.is_cpu and _suits_onednn(weight.dtype):
            return "onednn", _onednn(weight, bias, relu)
        return "torch", _plain(weight, bias, relu)
    panels = kernels.pack_weight(weight if weight.stride(1) == 1 else weight.contiguous())
    out_features = weight.shape[0]

    def apply(x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        return kernels.linear(x, panels, bias, out_features, relu)

    return "compiled", apply


def _suits_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        # Private checks, which another torch may lack. Without the instructions oneDNN would
        # emulate bfloat16; with ONEDNN_MAX_CPU_ISA in the environment it may refuse it.
        has_instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
        takes_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)
        return bool(has_instructions() and takes_bfloat16())
    return dtype == torch.float32


def _onednn(weight: Tensor, bias: Tensor | None, relu: bool) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ONEDNN_ROWS_HINT)
    operation = torch.ops.mkldnn._linear_pointwise.default
    attribute = "relu" if relu else "none"
    out_features = weight.shape[0]

    def apply(x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty((0, out_features))
        y: Tensor = operation(x, packed, bias, attribute, [], "")
        return y

    return apply


def _on_gpu(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """With a ReLU, in one kernel with the bias: in 16 bits in the product's, if torch has that."""
    from fastserve_kernels.gpu.kernels import bias_relu

    weight = weight.contiguous()
    fused = getattr(torch, "_addmm_activation", None)  # private: another torch may lack it
    if fused and bias is not None and weight.device.type == "cuda" and weight.itemsize == 2:
        transposed = weight.t()
        return lambda x: fused(bias, x, transposed)

    def apply(x: Tensor) -> Tensor:
        y = F.linear(x, weight)
        bias_relu(y, bias)
        return y

    return apply


def _plain(weight: Tensor, bias: Tensor | None, relu: bool) -> Callable[[Tensor], Tensor]:
    weight = weight.contiguous()  # some columns of a matrix are not, and would slow down each call

    def apply(x: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return y.relu_() if relu else y

    return apply
