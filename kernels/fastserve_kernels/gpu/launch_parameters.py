"""Launch parameters by head dimension, size of an element, group and architecture.

A group is the number of query heads that share a KV head. Architectures are those of compute
capability 8.0 (the A100's) and 9.0 (the H100's); others from 8.0 on use the newest row not newer
than they are. Rows for 8.0 keep within the 99 KiB of shared memory that 8.6 and 8.9 have.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_PADDED_HEAD_DIM = 64


def padded_head_dim(head_dim: int) -> int:
    """The power of two that kernels hold a head in, of at least 64."""
    return max(MIN_PADDED_HEAD_DIM, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True)
class DecodeParameters:
    """Of `paged_decode`. A grid of fixed size takes its work from a list."""

    key_tile: int
    """Tokens of K and V that a program loads at a time."""
    num_warps: int
    num_stages: int
    """Tiles in flight, the one worked on included."""
    programs_per_multiprocessor: int


@dataclass(frozen=True)
class PrefillParameters:
    """Of `paged_prefill`."""

    query_tile: int
    """Rows of a program."""
    key_tile: int
    num_warps: int
    num_stages: int


# (padded head dim, bytes of an element)
DECODE_HEADS = {
    (64, 2): DecodeParameters(64, 4, 3, 4),
    (128, 2): DecodeParameters(32, 4, 3, 4),
    (256, 2): DecodeParameters(16, 4, 3, 4),
    (64, 4): DecodeParameters(32, 4, 3, 4),
    (128, 4): DecodeParameters(16, 4, 3, 4),
    (256, 4): DecodeParameters(16, 4, 2, 3),
}
DECODE_GROUPS = {
    (64, 2): DecodeParameters(64, 4, 3, 4),
    (128, 2): DecodeParameters(64, 4, 3, 2),
    (256, 2): DecodeParameters(32, 4, 2, 2),
    (64, 4): DecodeParameters(32, 4, 2, 2),
    (128, 4): DecodeParameters(16, 4, 2, 2),
    (256, 4): DecodeParameters(16, 4, 2, 1),
}
PREFILL = {
    (64, 2, 80): PrefillParameters(128, 64, 4, 3),
    (128, 2, 80): PrefillParameters(128, 64, 8, 2),
    (256, 2, 80): PrefillParameters(64, 32, 4, 2),
    (64, 2, 90): PrefillParameters(128, 128, 8, 3),
    (128, 2, 90): PrefillParameters(128, 64, 8, 3),
    (256, 2, 90): PrefillParameters(64, 64, 4, 2),
    (64, 4, 80): PrefillParameters(32, 32, 4, 1),
    (128, 4, 80): PrefillParameters(32, 32, 4, 1),
    (256, 4, 80): PrefillParameters(16, 16, 4, 1),
}


def decode(
    head_dim: int, element_bytes: int, group: int, capability: tuple[int, int]
) -> DecodeParameters:
    """Parameters of `paged_decode`. capability: compute capability (major, minor)."""
    table = DECODE_HEADS if group == 1 else DECODE_GROUPS
    return table[padded_head_dim(head_dim), element_bytes]


def prefill(
    head_dim: int, element_bytes: int, group: int, capability: tuple[int, int]
) -> PrefillParameters:
    """Parameters of `paged_prefill`. capability: compute capability (major, minor)."""
    padded = padded_head_dim(head_dim)
    if capability >= (9, 0) and (padded, element_bytes, 90) in PREFILL:
        return PREFILL[padded, element_bytes, 90]
    return PREFILL[padded, element_bytes, 80]
