"""Weights in INT8: whole numbers from -127 to 127, and a scale for each output (row) of a linear.

Only the weights are rounded; activations keep their type. A scale is a number of the weight's own
type, chosen before the codes, so that it rounds nothing more; of float16, which does not reach as
far down as scales do, one of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 127
# Rows whose copy in float32 is made at a time.
_ROWS = 4096


def row_magnitudes(weight: Tensor) -> Tensor:
    """The largest magnitude of each row: weight [out, in] -> [out] of its dtype."""
    if weight.shape[1] == 0:
        return weight.new_zeros(weight.shape[0])
    low, high = weight.aminmax(dim=1)
    return torch.maximum(-low, high)


def quantize_rows(weight: Tensor, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """``weight[n, k] ≈ codes[n, k] · scale[n]``, each within half a scale, but for the scale's own
    rounding at the largest.

    Args:
        weight: ``[out, in]``, any floating type.
        magnitudes: ``[out]`` of its type: of whole rows, where it has only some of their columns.

    Returns:
        codes: int8 ``[out, in]``, contiguous. scale: ``[out]``. NaN and infinite magnitudes stay
        so, and with them all results of the row.
    """
    scale = magnitudes.float() / MOST
    if weight.dtype != torch.float16:
        scale = scale.to(weight.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        steps = weight[rows].float() / scale[rows].float()[:, None]
        codes[rows] = steps.round_().clamp_(-MOST, MOST).nan_to_num_().to(torch.int8)
    return codes, scale


def dequantize_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight that the codes stand for, in float32."""
    return codes.float() * scale.float()[:, None]


def rounded(weight: Tensor) -> Tensor:
    """The weight as `Int8Linear` has it, in float32: what its results are compared with."""
    return dequantize_rows(*quantize_rows(weight, row_magnitudes(weight)))
