"""Normalisation of a row, with or without residual addition, in one pass over memory.

A program holds a whole row in its registers, with 16 elements for each thread, so that four loads
of 16 bytes are under way at once. Rows of over 16384 elements have more elements for each thread;
the code is the same.
"""

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
from fastserve_kernels.gpu.launch_parameters import cdiv, next_power_of_2

_ELEMENTS_OF_A_WARP = 32 * 16
_MOST_WARPS = 32


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_layer_norm`. Grid: (T,)."""
    total, normed = _results(x)
    if len(x):
        # Missing parameters get a pointer that is not read.
        _add_layer_norm[(len(x),)](
            x, residual, x if weight is None else weight, x if bias is None else bias,
            total, normed, x.stride(0), residual.stride(0), x.shape[1], eps,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            **_launch_parameters(x.shape[1]), **launch_options(x.device),
        )  # fmt: skip
    return total, normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`. Grid: (T,)."""
    total, normed = _results(x)
    if len(x):
        _add_rms_norm[(len(x),)](
            x, residual, weight, total, normed, x.stride(0), residual.stride(0), x.shape[1], eps,
            shift,
            **_launch_parameters(x.shape[1]), **launch_options(x.device),
        )  # fmt: skip
    return total, normed


def rms_norm_heads(x: Tensor, weight: Tensor, eps: float, shift: float) -> None:
    """See `ops.rms_norm_heads`. Grid: (T, tiles of heads)."""
    num_tokens, heads, head_dim = x.shape
    dim_tile = next_power_of_2(head_dim)
    heads_tile = max(_ELEMENTS_OF_A_WARP // dim_tile, 1)
    if num_tokens:
        _rms_norm_heads[(num_tokens, cdiv(heads, heads_tile))](
            x, weight, x.stride(0), x.stride(1), heads, eps, shift,
            HEAD_DIM=head_dim, HEADS_TILE=heads_tile, DIM_TILE=dim_tile, num_warps=1,
            **launch_options(x.device),
        )  # fmt: skip


def _results(x: Tensor) -> tuple[Tensor, Tensor]:
    # empty_like(x) could keep the order of x's strides.
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, torch.empty_like(total)


def _launch_parameters(size: int) -> dict[str, int]:
    block = next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // _ELEMENTS_OF_A_WARP, 1), _MOST_WARPS)}


@triton.jit
def _add(x, residual, total, x_stride, residual_stride, size, columns, inside):
    """Store the row's sum, rounded to its dtype. Returns it in fp32, with zeros past the end."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(x + row * x_stride + columns, inside, other=0.0)
    second = tl.load(residual + row * residual_stride + columns, inside, other=0.0)
    rounded = (first.to(tl.float32) + second.to(tl.float32)).to(first.dtype)
    tl.store(total + row * size + columns, rounded, inside)
    return rounded.to(tl.float32)


@triton.jit
def _add_layer_norm(
    x, residual, weight, bias, total, normed, x_stride, residual_stride, size, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    # Load the parameters before waiting for the kernel that computes x, and for the sums.
    if HAS_WEIGHT:
        scale = tl.load(weight + columns, inside)
    if HAS_BIAS:
        shift = tl.load(bias + columns, inside)
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    values = _add(x, residual, total, x_stride, residual_stride, size, columns, inside)
    # Subtract the mean before squaring: a difference of large sums would cancel digits.
    # div_rn, because "/" is approximate and fused with the subtraction: for equal values the
    # difference would not be 0.
    mean = tl.div_rn(tl.sum(values, 0), size * 1.0)
    centred = tl.where(inside, values - mean, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    if HAS_WEIGHT:
        result *= scale.to(tl.float32)
    if HAS_BIAS:
        result += shift.to(tl.float32)
    tl.store(normed + tl.program_id(0).to(tl.int64) * size + columns, result, inside)


@triton.jit
def _add_rms_norm(
    x, residual, weight, total, normed, x_stride, residual_stride, size, eps, shift,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, inside)
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    values = _add(x, residual, total, x_stride, residual_stride, size, columns, inside)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    result = values * inverse * (scale.to(tl.float32) + shift)
    tl.store(normed + tl.program_id(0).to(tl.int64) * size + columns, result, inside)


@triton.jit
def _rms_norm_heads(
    x, weight, token_stride, head_stride, heads, eps, shift,
    HEAD_DIM: tl.constexpr, HEADS_TILE: tl.constexpr, DIM_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    inside = (head < heads) & (dim < HEAD_DIM)
    scale = tl.load(weight + dim, dim < HEAD_DIM)
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    rows = x + tl.program_id(0).to(tl.int64) * token_stride + head * head_stride + dim
    values = tl.load(rows, inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / HEAD_DIM + eps)
    tl.store(rows, values * inverse * (scale.to(tl.float32) + shift), inside)
