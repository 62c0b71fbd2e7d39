"""The KV cache in INT8: numbers from -127 to 127, and a float32 scale for each token of a head.

ALISE (§3.4) quantizes channels of whole blocks, which is what the host tier does
(`kv_quantization`). On the device a token is written as soon as it is computed, when the rest of
its block is not there yet. So each key and each value of a head has a scale of its own, and what a
token is rounded to depends on nothing else: not on the batch, on chunks, or on being swapped.

A cache in INT8 is one contiguous int8 tensor
``[num_blocks, layers, 2, kv_heads, block_size, head_dim + SCALE_BYTES]``. The bytes of one head in
one block are, in this order, codes ``[block_size, head_dim]`` and scales, float32 ``[block_size]``.
So a block is one run of bytes, which is copied and swapped as that of any other cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
MOST = 127


def is_int8(kv: Tensor) -> bool:
    return kv.dtype == torch.int8


def codes_and_scales(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the cache: codes int8 ``[…, block_size, head_dim]``, scales float32
    ``[…, block_size]``, the leading dimensions those of ``kv``."""
    *leading, block_size, width = kv.shape
    head_dim = width - SCALE_BYTES
    heads = kv.view(*leading, block_size * width)
    codes, scales = heads.split([block_size * head_dim, block_size * SCALE_BYTES], dim=-1)
    return codes.unflatten(-1, (block_size, head_dim)), scales.view(torch.float32)


def quantize_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """``tokens ≈ codes · scale``, each value within half a scale.

    Args:
        tokens: ``[…, head_dim]``, any floating type.

    Returns:
        codes: int8, the shape of ``tokens``. scales: float32 ``[…]``; NaN where a value is infinite
        or NaN, so that the whole token is, and 0 where all values are.
    """
    values = tokens.float()
    largest = values.abs().amax(dim=-1)
    scales = torch.where(largest.isfinite(), largest / MOST, torch.nan)
    # Of a token of zeros any number will do.
    steps = values / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = steps.round_().clamp_(-MOST, MOST).nan_to_num_()
    return codes.to(torch.int8), scales


def dequantize_tokens(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``quantize_tokens`` rounded its tokens to, in ``dtype``."""
    return (codes.float() * scales[..., None]).to(dtype)
