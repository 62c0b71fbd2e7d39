"""Shared by the attention kernels: reading tokens from the cache, and constants of the softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""The softmax uses powers of 2, which the hardware computes."""
NO_SCORE = tl.constexpr(-1.0e38)
"""The running maximum before any score. It is finite, so that subtracting -inf gives no NaN."""


@triton.jit
def token_offsets(
    table, block_stride, positions, context,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Offsets of a head's vectors at these positions, and of their scales in an INT8 cache (see
    `int8_cache`), in elements from the head's place in block 0.

    They are int64, because caches have more than 2^31 elements. MASKED: positions may reach past
    the context, where table entries mean nothing.
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

    head: the head's place in block 0. vectors, scales: from `token_offsets`. MASKED: as there. With
    INT8 the result is rounded to `dtype`; otherwise it has the cache's dtype.
    """
    dims = tl.arange(0, PADDED_DIM)
    tokens = tl.load(head + (vectors[:, None] + dims[None, :]), mask=used, other=0)
    if INT8:
        of_tokens = tl.load((head + scales).to(tl.pointer_type(tl.float32)))
        tokens = tokens.to(tl.float32) * of_tokens[:, None]
        if MASKED:  # where there is no token, the scale may be NaN
            tokens = tl.where(used, tokens, 0.0)
        tokens = tokens.to(dtype)
    return tokens
