"""Inference-only linear layers with the weight packed once for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_kernels.backend import compiled_for, uses_triton

ONEDNN_ROWS_HINT = 16
"""Rows that oneDNN lays the weight out for. Measured in fp32 for 1 to 2048 rows: a layout for 16
or 256 serves every count, one for a single row loses up to 70% from 4 rows on."""


class PackedLinear:
    """y = x @ weight.T + bias, optionally with a ReLU, for inference.

    The weight is kept in one packed copy; the given tensor is not kept unless the device wants it
    as it is. `path` says what runs:

    - "compiled": this package's kernel, float32 and bfloat16 on a CPU. Results do not depend on the
      number of rows in a call, bit for bit.
    - "onednn": oneDNN's prepacked kernels. Without a C++ compiler float32, and bfloat16 where the
      CPU has instructions for it.
    - "torch": `torch.nn.functional.linear`, for all else; on a GPU a ReLU is fused with the bias.

    The last two choose their method by the number of rows, on which the last bits may so depend.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> None:
        """weight [out, in], bias [out] of the same dtype and device, or None."""
        weight = weight.detach()
        bias = None if bias is None else bias.detach().contiguous()
        self.out_features, self.in_features = weight.shape
        self.path, self._apply = _choose(weight, bias, relu)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of the weight's dtype, T may be 0 -> [T, out], contiguous."""
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
        # A private check, which may be gone in another torch. Else oneDNN emulates bfloat16.
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
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
    """With a ReLU."""
    from fastserve_kernels.gpu.kernels import bias_relu

    weight = weight.contiguous()

    def apply(x: Tensor) -> Tensor:
        y = F.linear(x, weight)
        bias_relu(y, bias)
        return y

    return apply


def _plain(weight: Tensor, bias: Tensor | None, relu: bool) -> Callable[[Tensor], Tensor]:
    weight = weight.contiguous()  # a part of the columns is not, and would be slower in each call

    def apply(x: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return y.relu_() if relu else y

    return apply
