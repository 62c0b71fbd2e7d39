"""Element-wise operations between the linear layers of a feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.dependent_launch import (
    launch_dependents,
    launch_options,
    wait_for_earlier,
)
from fastserve_kernels.gpu.launch_parameters import cdiv

# Elements for one program: 16 bytes of 16-bit values for each thread of 4 warps.
_BLOCK = 1024


def bias_relu(x: Tensor, bias: Tensor | None) -> None:
    """max(x + bias, 0), in place. Computed in fp32 and rounded once.

    x: [T, n], rows contiguous.
    bias: [n] of x's dtype, or None.
    Grid: (T, blocks of n).
    """
    rows, size = x.shape
    if rows:
        _bias_relu[(rows, cdiv(size, _BLOCK))](
            x, x if bias is None else bias, x.stride(0), size,
            HAS_BIAS=bias is not None, BLOCK=_BLOCK, num_warps=4, **launch_options(x.device),
        )  # fmt: skip


def silu_mul(x: Tensor) -> Tensor:
    """See `ops.silu_mul`. Grid: (T, blocks of n)."""
    return _gated(x, is_gelu=False)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """See `ops.gelu_tanh_mul`. Grid: (T, blocks of n)."""
    return _gated(x, is_gelu=True)


def _gated(x: Tensor, is_gelu: bool) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _gate_mul[(rows, cdiv(size, _BLOCK))](
            x, out, x.stride(0), size, IS_GELU=is_gelu, BLOCK=_BLOCK, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return out


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """See `ops.clamped_swiglu`. Grid: (T, blocks of n)."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _clamped_swiglu[(rows, cdiv(size, _BLOCK))](
            x, out, x.stride(0), size, alpha, limit, BLOCK=_BLOCK, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return out


@triton.jit
def _bias_relu(
    x, bias, stride, size, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = x + tl.program_id(0).to(tl.int64) * stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    if HAS_BIAS:
        shift = tl.load(bias + columns, inside).to(tl.float32)
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    values = tl.load(row + columns, inside).to(tl.float32)
    if HAS_BIAS:
        values += shift
    tl.store(row + columns, tl.maximum(values, 0.0, tl.PropagateNan.ALL), inside)


@triton.jit
def _gate_mul(x, out, stride, size, IS_GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    gate = tl.load(x + token * stride + columns, inside).to(tl.float32)
    up = tl.load(x + token * stride + size + columns, inside).to(tl.float32)
    inner = gate
    if IS_GELU:
        # (1 + tanh(u)) / 2 is the logistic function of 2u. The numbers: sqrt(8/pi) {1, 0.044715}.
        inner = gate * (1.5957691216 + 0.0713548163 * gate * gate)
    tl.store(out + token * size + columns, gate / (1.0 + tl.exp(-inner)) * up, inside)


@triton.jit
def _clamped_swiglu(x, out, stride, size, alpha, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    gate = tl.load(x + token * stride + columns, inside).to(tl.float32)
    up = tl.load(x + token * stride + size + columns, inside).to(tl.float32)
    gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
    up = tl.maximum(tl.minimum(up, limit, tl.PropagateNan.ALL), -limit, tl.PropagateNan.ALL)
    tl.store(
        out + token * size + columns, (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate)), inside
    )
