"""Rounds weights of linear layers. Activations keep their type.

INT8: codes from -127 to 127, and a scale for each row (output). A scale has the weight's own type,
and codes are chosen for the rounded scale, so that its rounding adds no error. For float16, whose
range is too small for scales, they are float32.

Fewer bits: codes from 0, and a scale and an offset for each group of neighbouring columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight

MOST = 127
# So many rows are copied to float32 at a time: few enough for a processor's cache.
_ROWS = 256


def row_magnitudes(weight: Tensor) -> Tensor:
    """The largest magnitude of each row: weight [out, in] -> [out] of its dtype."""
    if weight.shape[1] == 0:
        return weight.new_zeros(weight.shape[0])
    low, high = weight.aminmax(dim=1)
    return torch.maximum(-low, high)


def quantize_rows(weight: Tensor, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize: ``weight[n, k] ≈ codes[n, k] · scale[n]``.

    Each value is within half a scale. The largest of a row may be off by the scale's own rounding.

    Args:
        weight: ``[out, in]``, any floating type.
        magnitudes: ``[out]`` of the same type, the largest magnitudes of whole rows. The weight may
            have only some of their columns.

    Returns:
        codes: int8 ``[out, in]``, contiguous.
        scale: ``[out]``. A NaN or infinite magnitude makes all results of its row NaN or infinite.
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
    """The quantized weight, in float32."""
    return codes.float() * scale.float()[:, None]


def rounded(weight: Tensor) -> Tensor:
    """The weight as `Int8Linear` uses it, in float32, to compare its results with."""
    return dequantize_rows(*quantize_rows(weight, row_magnitudes(weight)))


def quantize_groups(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Quantize: the least number of each group becomes code 0, the largest the largest code.

    Scales and offsets are bfloat16, and codes are chosen for the rounded ones. So each value is
    within half a scale, except for what the rounding of scale and offset leaves outside the range.

    Args:
        weight: ``[out, in]``, any floating type, finite.
        group: columns of a group. It divides `in`.
    """
    most = 2**bits - 1
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    shape = (len(weight), weight.shape[1] // group)
    scales, lows = (
        torch.empty(shape, dtype=torch.bfloat16, device=weight.device) for _ in range(2)
    )
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        by_group = weight[rows].float().unflatten(1, (-1, group))
        low, high = by_group.aminmax(dim=2)
        scale = (high - low) / most
        scales[rows] = torch.where(scale == 0, torch.ones_like(scale), scale)
        lows[rows] = low
        steps = (by_group - lows[rows].float()[..., None]) / scales[rows].float()[..., None]
        codes[rows] = steps.round_().clamp_(0, most).flatten(1).to(torch.uint8)
    return QuantizedWeight(
        f"INT{bits}", codes, bits, group, GroupNumbers(scales), GroupNumbers(lows)
    )
