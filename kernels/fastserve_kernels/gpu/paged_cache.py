"""What the attention kernels share: reading tokens from the cache, and the softmax's constants."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""The softmax is taken to base 2, which the hardware computes."""
NO_SCORE = tl.constexpr(-1.0e38)
"""The running maximum before any score: finite, so that its difference to -inf is no NaN."""


@triton.jit
def token_offsets(
    table, block_stride, positions, context,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Where a head's vectors at these positions lie, and their scales where the cache is in INT8
    (see `int8_cache`): in elements from the head's place in block 0.

    int64, as caches have more than 2^31 elements. MASKED where positions reach past the context,
    behind which table entries mean nothing.
    """
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < context, other=0)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE)
    starts, places = blocks.to(tl.int64) * block_stride, positions % BLOCK_SIZE
    return starts + places * HEAD_DIM, starts + (BLOCK_SIZE * HEAD_DIM + places * 4)


@triton.jit
def load_tokens(
    head, vectors, scales, used, dtype: tl.constexpr, PADDED_DIM: tl.constexpr,
    INT8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head, [tokens, PADDED_DIM], zero where not `used`.

    head: its place in block 0. vectors, scales: of `token_offsets`. With INT8 the result is rounded
    to `dtype`, else it is as the cache has it. MASKED as in `token_offsets`.
    """
    dims = tl.arange(0, PADDED_DIM)
    tokens = tl.load(head + (vectors[:, None] + dims[None, :]), mask=used, other=0)
    if INT8:
        of_tokens = tl.load((head + scales).to(tl.pointer_type(tl.float32)))
        tokens = tokens.to(tl.float32) * of_tokens[:, None]
        if MASKED:  # the scale of no token may be NaN
            tokens = tl.where(used, tokens, 0.0)
        tokens = tokens.to(dtype)
    return tokens
