"""Launch parameters by head dimension or rows, size of an element, group and architecture.

A group is the number of query heads that share a KV head. Architectures are those of compute
capability 8.0 (the A100's) and 9.0 (the H100's); others from 8.0 on use the newest row not newer
than they are that fits. A program of a row for 8.0 keeps within the 99 KiB of shared memory of 8.6,
8.9 and 12.x (RTX cards), one for 9.0 does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

MIN_PADDED_HEAD_DIM = 64


# (Triton's own are for kernels: on the host they take a microsecond or more.)
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two of at least n > 0."""
    return 1 << (n - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """The power of two that kernels hold a head in, of at least 64."""
    return max(MIN_PADDED_HEAD_DIM, next_power_of_2(head_dim))


@dataclass(frozen=True)
class DecodeParameters:
    """Of `paged_decode`. A grid of fixed size takes its work from a list."""

    key_tile: int
    """Tokens of K and V that a program loads at a time."""
    num_warps: int
    num_stages: int
    """Depth of the loop's pipeline: loads of block table, then of K and V, then the sums."""
    programs_per_multiprocessor: int


@dataclass(frozen=True)
class PrefillParameters:
    """Of `paged_prefill`."""

    query_tile: int
    """Rows of a program."""
    key_tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class LinearParameters:
    """Of `int8_linear`."""

    row_tile: int
    """Rows of a program; but for the last of a list, all rows that it is for."""
    out_tile: int
    in_tile: int
    """Elements of a row of x, and of the weight, that a program loads at a time."""
    num_warps: int
    num_stages: int


# Keys are (padded head dim, bytes of an element, 10 * major + minor of the architecture). What the
# rows rest on is the machine code, over which tests/kernels/gpu/test_attention_machine_code.py
# keeps watch. docs/performance_gpu.md has an H100's times of the choices for 9.0; no others were
# tried.
#
# Decode waits for memory. Some 3 TB/s at 700 ns, an H100's, take 16 to 32 KiB under way on each of
# its 132 multiprocessors. Tiles of 4 KiB of K and as much of V, four or five deep, give one program
# alone as much, which counts when there are few, and leave room for four or five programs, whose
# starts and ends then hide behind each other. All programs of a grid must fit on the device at a
# time, for each has its share of the work from the outset.
DECODE_HEADS = {
    (64, 2, 80): DecodeParameters(32, 4, 5, 4),
    (128, 2, 80): DecodeParameters(16, 4, 5, 4),
    (256, 2, 80): DecodeParameters(8, 4, 5, 4),
    (64, 4, 80): DecodeParameters(16, 4, 5, 4),
    (128, 4, 80): DecodeParameters(8, 4, 5, 4),
    (256, 4, 80): DecodeParameters(8, 4, 3, 4),
    (64, 2, 90): DecodeParameters(32, 4, 6, 5),
    (128, 2, 90): DecodeParameters(16, 4, 6, 5),
    (256, 2, 90): DecodeParameters(8, 4, 6, 5),
}
# Groups need larger tiles, as the warps meet in each for its maximum. Of the stages, half are the
# block table's: K and V wait for it.
DECODE_GROUPS = {
    (64, 2, 80): DecodeParameters(64, 4, 5, 4),
    (128, 2, 80): DecodeParameters(32, 4, 5, 4),
    (256, 2, 80): DecodeParameters(32, 8, 5, 2),
    (64, 4, 80): DecodeParameters(32, 4, 5, 4),
    (128, 4, 80): DecodeParameters(16, 4, 5, 3),
    (256, 4, 80): DecodeParameters(16, 4, 3, 2),
    (64, 2, 90): DecodeParameters(64, 4, 7, 4),
    (128, 2, 90): DecodeParameters(32, 4, 7, 4),
    (256, 2, 90): DecodeParameters(32, 4, 5, 2),
}
# Prefill waits for the tensor cores. Two warpgroups of 64 rows each share the tiles of K and V on
# 9.0, without which the L2 cache would have to deliver more than it can. With head dimension 64
# there is room for two programs, one of which multiplies while the other takes exponentials. Of the
# stages, two are the block table's: with fewer than five, K and V of the next tile would wait for
# the end of this one. With head dimension 64 on 8.0 they do, and three programs fill that time:
# tiles small enough for a second buffer beside them take a third more instructions.
PREFILL = {
    (64, 2, 80): PrefillParameters(64, 64, 4, 3),
    (128, 2, 80): PrefillParameters(128, 64, 8, 5),
    (256, 2, 80): PrefillParameters(64, 16, 8, 5),
    (64, 4, 80): PrefillParameters(32, 32, 8, 1),
    (128, 4, 80): PrefillParameters(32, 16, 8, 1),
    (256, 4, 80): PrefillParameters(16, 16, 8, 1),
    (64, 2, 90): PrefillParameters(128, 64, 8, 5),
    (128, 2, 90): PrefillParameters(128, 64, 8, 5),
    (256, 2, 90): PrefillParameters(128, 32, 8, 5),
}

# Of caches in INT8, where these differ: the numbers that codes are widened to take registers, which
# leaves room for fewer programs or smaller tiles. (Prefill with head dimension 256 on 8.0 spills
# with every tile.)
INT8_DECODE_HEADS = {
    **DECODE_HEADS,
    (64, 2, 80): DecodeParameters(32, 4, 6, 4),
}
INT8_DECODE_GROUPS = {
    **DECODE_GROUPS,
    (64, 2, 80): DecodeParameters(64, 4, 5, 3),
    (128, 2, 80): DecodeParameters(32, 4, 5, 3),
    (256, 2, 80): DecodeParameters(32, 8, 5, 1),
    (64, 2, 90): DecodeParameters(64, 4, 5, 3),
    (128, 2, 90): DecodeParameters(32, 4, 5, 3),
}
INT8_PREFILL = {
    **PREFILL,
    (128, 2, 80): PrefillParameters(128, 32, 8, 5),
    (256, 2, 80): PrefillParameters(64, 16, 4, 3),
}

# Keys are (bytes of an element of x, architecture); of each list, the first that takes so many rows
# of x, or else the last. With few of them the weight's way from memory is what takes time: narrow
# tiles, so that a layer has more programs than there are multiprocessors, each with 24 KiB of codes
# under way (for float32, which is not meant to be fast, 12). No others were tried.
LINEAR = {
    (2, 80): [
        LinearParameters(16, 32, 256, 4, 4),
        LinearParameters(64, 64, 128, 4, 3),
        LinearParameters(128, 128, 64, 8, 3),
    ],
    (4, 80): [LinearParameters(16, 32, 128, 4, 4), LinearParameters(64, 64, 32, 8, 3)],
    (2, 90): [
        LinearParameters(16, 32, 256, 4, 4),
        LinearParameters(64, 64, 128, 4, 4),
        LinearParameters(128, 128, 64, 8, 4),
    ],
}

Parameters = TypeVar("Parameters")


def decode(
    head_dim: int, element_bytes: int, group: int, capability: tuple[int, int], int8: bool
) -> DecodeParameters:
    """Parameters of `paged_decode`. element_bytes: of a query. capability: compute capability
    (major, minor). int8: whether the cache is in INT8."""
    if group == 1:
        table = INT8_DECODE_HEADS if int8 else DECODE_HEADS
    else:
        table = INT8_DECODE_GROUPS if int8 else DECODE_GROUPS
    return _row(table, head_dim, element_bytes, capability)


def prefill(
    head_dim: int, element_bytes: int, capability: tuple[int, int], int8: bool
) -> PrefillParameters:
    """Parameters of `paged_prefill`, as for `decode`; the query tile is that of any cache."""
    return _row(INT8_PREFILL if int8 else PREFILL, head_dim, element_bytes, capability)


def linear(rows: int, element_bytes: int, capability: tuple[int, int]) -> LinearParameters:
    """Parameters of `int8_linear` for so many rows."""
    ways = linear_ways(element_bytes, capability)
    return next((way for way in ways if rows <= way.row_tile), ways[-1])


def linear_ways(element_bytes: int, capability: tuple[int, int]) -> list[LinearParameters]:
    """All that `linear` may choose, each for more rows than those before it."""
    hopper = (element_bytes, 90)
    return LINEAR[
        hopper if _has_shared_memory(capability) and hopper in LINEAR else (element_bytes, 80)
    ]


def _row(
    table: dict[tuple[int, int, int], Parameters],
    head_dim: int,
    element_bytes: int,
    capability: tuple[int, int],
) -> Parameters:
    padded = padded_head_dim(head_dim)
    hopper = (padded, element_bytes, 90)
    return table[
        hopper if _has_shared_memory(capability) and hopper in table else (*hopper[:2], 80)
    ]


def _has_shared_memory(capability: tuple[int, int]) -> bool:
    """As much as the rows for 9.0 take."""
    return (9, 0) <= capability < (12, 0)
