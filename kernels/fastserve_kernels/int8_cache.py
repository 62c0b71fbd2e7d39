"""The KV cache in INT8: codes from -127 to 127, and a float32 scale for each token of a head.

ALISE (§3.4) quantizes channels of whole blocks, as the host tier does (`kv_quantization`). On the
device a token is written as soon as it is computed, before its block is full. So each key and each
value of a head has its own scale. What a token is rounded to depends on nothing else: not on the
batch, on chunks, or on swapping.

The cache is one contiguous int8 tensor
``[num_blocks, layers, 2, kv_heads, block_size, head_dim + SCALE_BYTES]``. The bytes of one head in
one block are first codes ``[block_size, head_dim]``, then scales, float32 ``[block_size]``. So a
block is contiguous, and is copied and swapped like that of any other cache. Where keys and values
have different sizes, head_dim is the larger one.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
MOST = 127


def is_int8(kv: Tensor) -> bool:
    return kv.dtype == torch.int8


def token_width(kv: Tensor) -> int:
    """Elements or codes of a row of the cache, which holds one token of a head."""
    return kv.shape[-1] - SCALE_BYTES if is_int8(kv) else kv.shape[-1]


def codes_and_scales(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the cache: codes int8 ``[…, block_size, head_dim]`` and scales float32
    ``[…, block_size]``, with the leading dimensions of ``kv``."""
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
        codes: int8, the shape of ``tokens``.
        scales: float32 ``[…]``. NaN if a value of the token is infinite or NaN: then the whole
        token is read as NaN. 0 if all values are 0.
    """
    values = tokens.float()
    largest = values.abs().amax(dim=-1)
    scales = torch.where(largest.isfinite(), largest / MOST, torch.nan)
    # For a token of zeros any divisor will do.
    steps = values / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = steps.round_().clamp_(-MOST, MOST).nan_to_num_()
    return codes.to(torch.int8), scales


def dequantize_tokens(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens that ``quantize_tokens`` has rounded, in ``dtype``."""
    return (codes.float() * scales[..., None]).to(dtype)
