"""Copies of KV blocks: which pairs go together, and those within a device's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


def runs(blocks: Sequence[int], others: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The pairs of blocks, those that are neighbours on both sides together: one copy each, in any
    order."""
    # A job's blocks descend where it was given those that another had kept.
    pairs = sorted(zip(blocks, others, strict=True))
    begin = 0
    for end in range(1, len(pairs) + 1):
        block, other = pairs[end - 1]
        if end < len(pairs) and pairs[end] == (block + 1, other + 1):
            continue
        count = end - begin
        block, other = pairs[begin]
        yield slice(block, block + count), slice(other, other + count)
        begin = end


def copy_within(kv: Tensor, from_blocks: Sequence[int], to_blocks: Sequence[int]) -> None:
    """Begin to copy blocks of the cache to others, which are none of those, on the current stream.

    Args:
        kv: ``[num_blocks, ...]``.
    """
    for source, target in runs(from_blocks, to_blocks):
        kv[target].copy_(kv[source], non_blocking=True)
