"""Shared by the attention kernels: reading tokens from the cache, and parts of the softmax."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fastserve_kernels.attention_rule import AttentionRule

LOG2_E = 1.4426950408889634
"""The softmax uses powers of 2, which the hardware computes."""
_LOG2_E = tl.constexpr(LOG2_E)
NO_SCORE = tl.constexpr(-1.0e38)
"""The running maximum before any score. It is finite, so that subtracting -inf gives no NaN."""


def rule_arguments(rule: AttentionRule) -> dict[str, Any]:
    """A rule as the kernels take it. What it leaves out is None there, and then the kernels are
    compiled without it.

    scale: of scores to the log2 domain, or of their tanh.
    in_tanh: of scores in their tanh, as `tanh_of` takes them.
    """
    scale, in_tanh = rule.scale, None
    if rule.soft_cap is not None:
        scale, in_tanh = rule.soft_cap, 2 * LOG2_E * rule.scale / rule.soft_cap
    return {
        "scale": scale * LOG2_E,
        "in_tanh": in_tanh,
        "window": rule.window,
        "sinks": rule.sinks,
    }


@triton.jit
def first_visible(context, window):
    """The first position to which the last row of a context attends."""
    return tl.maximum(context - window, 0)


@triton.jit
def tanh_of(scores, in_tanh):
    """The absolute error is up to 2e-7."""
    return 1 - 2 / (1 + tl.exp2(scores * in_tanh))


@triton.jit
def share_beside_sinks(log_sums, sinks, heads, mask):
    """What a head's sink leaves to the tokens. log_sums: the logarithms of the sums of their
    weights. Both are in the log2 domain here."""
    sink = tl.load(sinks + heads, mask=mask) * _LOG2_E
    return 1 / (1 + tl.exp2(sink - log_sums))


@triton.jit
def token_offsets(table, block_stride, positions, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Offsets of a head's vectors at these positions, and of their scales in an INT8 cache (see
    `int8_cache`), in elements from the head's place in block 0.

    They are int64, because caches have more than 2^31 elements.

    BLOCK_SIZE: a power of two. ROW: elements of the cache for one token of a head, without a scale.
    """
    blocks = tl.load(table + positions // BLOCK_SIZE)
    starts, places = blocks.to(tl.int64) * block_stride, positions & (BLOCK_SIZE - 1)
    return starts + places * ROW, starts + (BLOCK_SIZE * ROW + places * 4)


@triton.jit
def load_tokens(
    head, vectors, scales, dtype: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head, [tokens, PADDED_DIM], zero from DIM on.

    head: the head's place in block 0. vectors, scales: as from `token_offsets`. With INT8 the
    result is rounded to `dtype`; otherwise it has the cache's dtype.
    """
    dims = tl.arange(0, PADDED_DIM)
    tokens = head + (vectors[:, None] + dims[None, :])
    if DIM == PADDED_DIM:
        tokens = tl.load(tokens)
    else:
        tokens = tl.load(tokens, mask=(dims < DIM)[None, :], other=0)
    if INT8:
        of_tokens = tl.load((head + scales).to(tl.pointer_type(tl.float32)))
        tokens = (tokens.to(tl.float32) * of_tokens[:, None]).to(dtype)
    return tokens
