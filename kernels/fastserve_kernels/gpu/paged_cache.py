"""What the attention kernels share: where tokens lie in the cache, and the softmax's constants."""

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
    """Where a head's vectors at these positions lie, in elements from the head's place in block 0.

    int64, as caches have more than 2^31 elements. MASKED where positions reach past the context,
    behind which table entries mean nothing.
    """
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < context, other=0)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE)
    return blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM
