"""KV blocks in INT8: one scale and one offset for each channel of a block (ALISE §3.4).

A channel is one of the ``head_dim`` places of a head in one layer, of K or V, over all tokens of a
block. Some channels of keys are far from zero, so the range is asymmetric:
``x ≈ scale · (code + 128) + minimum`` with ``scale = (max - min) / 255``.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 255
LOWEST_CODE = -128
# A smaller scale would lose digits in float16. An error of half this scale does not matter in KV.
LEAST_SCALE = 2.0**-14
LARGEST = torch.finfo(torch.float16).max


def quantize(blocks: Tensor, num_last_tokens: int) -> tuple[Tensor, Tensor]:
    """Quantize blocks to INT8 codes, with the parameters to read them.

    Args:
        blocks: ``[n, layers, 2, kv_heads, block_size, head_dim]``, any floating type.
        num_last_tokens: tokens in the last block; its other rows may hold anything.

    Returns:
        codes: int8, the shape of ``blocks``.
        parameters: float16 ``[n, layers, 2, kv_heads, 2, head_dim]``: scale and minimum.
    """
    values = blocks.to(torch.float32, copy=True)  # changed in place below
    if num_last_tokens < values.shape[4]:
        # Unused rows repeat a used one, so that they do not widen the range.
        values[-1, :, :, :, num_last_tokens:] = values[-1, :, :, :, :1]
    low, high = torch.aminmax(values, dim=4, keepdim=True)
    parameters = (
        torch.cat([((high - low) / LEVELS).clamp_(min=LEAST_SCALE), low], dim=4)
        .clamp_(-LARGEST, LARGEST)
        .half()
    )
    scale, minimum = _scale_and_minimum(parameters)
    codes = values.sub_(minimum).div_(scale).round_().add_(LOWEST_CODE)
    return codes.clamp_(LOWEST_CODE, LOWEST_CODE + LEVELS).to(torch.int8), parameters


def dequantize(codes: Tensor, parameters: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks again, in ``dtype``. Each value is within half a scale of the original, apart from
    the rounding of ``dtype`` and of the parameters."""
    scale, minimum = _scale_and_minimum(parameters)
    return codes.float().sub_(LOWEST_CODE).mul_(scale).add_(minimum).to(dtype)


def _scale_and_minimum(parameters: Tensor) -> tuple[Tensor, Tensor]:
    values = parameters.float()
    return values[:, :, :, :, :1], values[:, :, :, :, 1:]
