"""Launch parameters, by head dimension or rows, element size, group and architecture.

A group is the number of query heads that share a KV head. There are rows for compute capability 8.0
(A100) and 9.0 (H100). Other GPUs from 8.0 on use the newest row that is not newer than they are and
that fits. Rows for 8.0 stay within the 99 KiB of shared memory of 8.6, 8.9 and 12.x (RTX cards);
rows for 9.0 do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

MIN_PADDED_HEAD_DIM = 64
REGISTERS = 64 * 1024
REGISTER_UNIT = 8
"""Registers of a multiprocessor, and the multiple in which a thread gets them."""


# Triton's own functions are for kernels: on the host they take a microsecond or more.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """The size in which kernels hold a head: a power of two, at least 64."""
    return max(MIN_PADDED_HEAD_DIM, next_power_of_2(head_dim))


@dataclass(frozen=True)
class DecodeParameters:
    """Parameters of `paged_decode`, whose grid of fixed size takes its work from a list."""

    key_tile: int
    """How many tokens of K and V a program loads at a time."""
    num_warps: int
    num_stages: int
    """Depth of the loop's pipeline: it loads the block table, then K and V, then sums."""
    programs_per_multiprocessor: int
    """How many the grid has for each multiprocessor."""


@dataclass(frozen=True)
class PrefillParameters:
    """Parameters of `paged_prefill`."""

    query_tile: int
    """Rows of a program."""
    key_tile: int
    num_warps: int
    num_stages: int
    overlap: bool
    """Whether a tile's values are multiplied during the softmax of the next tile."""


@dataclass(frozen=True)
class LinearParameters:
    """Parameters of `int8_linear`."""

    row_tile: int
    """Rows of a program. It is also the most rows that these parameters are for, except for the
    last of a list."""
    out_tile: int
    in_tile: int
    """How many elements of a row of x, and of the weight, a program loads at a time."""
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    """`int8_linear` splits the columns to have so many, if the layer is small."""


@dataclass(frozen=True)
class QuantizedParameters:
    """Parameters of `quantized_linear`."""

    row_tile: int
    """Rows of a program. It is also the most rows that these parameters are for, except for the
    last of a list."""
    out_tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    """How many run at once. The columns are split to have so many, if the layer is small."""


# Keys are (padded head dim, bytes of an element, 10 * major + minor of the architecture). The rows
# were chosen by their machine code, which tests/kernels/gpu/test_attention_machine_code.py checks.
# docs/performance_gpu.md has an H100's times for the rows of 9.0. Other choices were tried only
# where a comment says so.
#
# Decode waits for memory. An H100 has about 3 TB/s with 700 ns of latency, so each of its 132
# multiprocessors needs 16 to 32 KiB under way. Tiles of 4 KiB of K and 4 KiB of V, four or five
# deep, give even a single program that much. They leave room for four or five programs on a
# multiprocessor, whose starts and ends then overlap. All programs of a grid should fit on the
# device at once, because each has its share of the work from the start.
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
# Groups need larger tiles, because the warps synchronise in each tile for its maximum. Half of the
# stages load the block table, for which K and V wait.
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
# Prefill waits for the tensor cores. On 9.0 two warpgroups of 64 rows each share the tiles of K and
# V; otherwise the L2 cache would have to deliver more than it can. With head dimension 64 there is
# room for two programs: one multiplies while the other computes exponentials. With 128 there is
# room for one, so it does both itself. Its tiles have 128 keys, since a product with 64 columns
# whose factors are both in shared memory needs all of that memory's bandwidth. A few registers
# spill, four of them in the loop. With head dimension 256 or two programs there are too few
# registers to overlap. No GPU has run the overlapping form yet.
#
# Without overlap, two of the stages load the block table. With fewer than five stages, K and V of
# the next tile would wait for the end of this one. With head dimension 64 on 8.0 they do wait, but
# three programs fill that time: tiles small enough for a second buffer would take a third more
# instructions.
PREFILL = {
    (64, 2, 80): PrefillParameters(64, 64, 4, 3, False),
    (128, 2, 80): PrefillParameters(128, 64, 8, 5, False),
    (256, 2, 80): PrefillParameters(64, 16, 8, 5, False),
    (64, 4, 80): PrefillParameters(32, 32, 8, 1, False),
    (128, 4, 80): PrefillParameters(32, 16, 8, 1, False),
    (256, 4, 80): PrefillParameters(16, 16, 8, 1, False),
    (64, 2, 90): PrefillParameters(128, 64, 8, 5, False),
    (128, 2, 90): PrefillParameters(128, 128, 8, 3, True),
    (256, 2, 90): PrefillParameters(128, 32, 8, 5, False),
}

# The differences for caches in INT8. The widened codes take registers, which leaves room for fewer
# programs or smaller tiles. (Prefill with head dimension 256 on 8.0 spills with every tile.) With
# head dimension 128 five programs fit on 9.0, but an H200 took 6% less time for eight: 168 µs, not
# 179, for 64 jobs of 512 tokens with 40 heads.
INT8_DECODE_HEADS = {
    **DECODE_HEADS,
    (64, 2, 80): DecodeParameters(32, 4, 6, 4),
    (128, 2, 90): DecodeParameters(16, 4, 6, 8),
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
    (128, 2, 80): PrefillParameters(128, 32, 8, 5, False),
    (256, 2, 80): PrefillParameters(64, 16, 4, 3, False),
    (128, 2, 90): PrefillParameters(128, 64, 8, 5, False),
}

# Keys are (bytes of an element of x, architecture). Of each list the first entry for so many rows
# of x is used, or else the last. Up to 64 rows each of two warps has weights of its own, so that
# each code is widened once (four warps with 32 rows of the weight would widen all twice). With few
# rows tiles are narrow: a layer has many programs, with 8 KiB of codes a stage. With more, reading
# x from the L2 cache takes time, so tiles of the weight are wide. float32 need not be fast.
LINEAR = {
    (2, 80): [
        LinearParameters(16, 32, 256, 2, 3, 6),
        LinearParameters(64, 128, 32, 2, 6, 4),
        LinearParameters(128, 128, 64, 8, 3, 1),
    ],
    (4, 80): [LinearParameters(16, 32, 128, 4, 4, 1), LinearParameters(64, 64, 32, 8, 3, 1)],
    (2, 90): [
        LinearParameters(16, 32, 256, 2, 3, 6),
        LinearParameters(64, 128, 32, 2, 6, 4),
        LinearParameters(128, 128, 64, 8, 4, 1),
    ],
}

# As for `LINEAR`. With up to 8 rows two warps have 64 rows of the weight each. So what every warp
# does with x is done for many codes, and tiles read x from the L2 cache less often. With up to
# 16 they have no registers for that, as there are more sums to scale. With more than 16, codes
# are scaled instead (`widened_codes.scales_codes`). Each choice has as many programs as fit without
# spilled registers. Formats of floats scale sums at any number of rows, and need more registers.
# All this was counted in machine code, not measured.
QUANTIZED = {
    (2, 80): [
        QuantizedParameters(8, 128, 2, 3, 6),
        QuantizedParameters(16, 64, 2, 3, 6),
        QuantizedParameters(64, 128, 8, 3, 2),
    ],
    (4, 80): [QuantizedParameters(16, 64, 4, 3, 4), QuantizedParameters(64, 64, 8, 3, 2)],
    (2, 90): [
        QuantizedParameters(8, 128, 2, 4, 6),
        QuantizedParameters(16, 64, 2, 4, 6),
        QuantizedParameters(64, 128, 4, 3, 3),
    ],
}
QUANTIZED_FLOATS = {
    **QUANTIZED,
    (2, 80): [*QUANTIZED[2, 80][:-1], QuantizedParameters(64, 128, 8, 3, 1)],
    (2, 90): [*QUANTIZED[2, 90][:-1], QuantizedParameters(64, 128, 4, 3, 2)],
}

Parameters = TypeVar("Parameters")


def decode(
    head_dim: int, element_bytes: int, group: int, capability: tuple[int, int], int8: bool
) -> DecodeParameters:
    """Parameters of `paged_decode`.

    element_bytes: bytes of an element of the query.
    capability: compute capability (major, minor).
    int8: whether the cache is in INT8.
    """
    if group == 1:
        table = INT8_DECODE_HEADS if int8 else DECODE_HEADS
    else:
        table = INT8_DECODE_GROUPS if int8 else DECODE_GROUPS
    return _row(table, head_dim, element_bytes, capability)


def decode_registers(parameters: DecodeParameters) -> int:
    """The most registers of a thread such that the programs of a grid fit on the device, or five on
    each multiprocessor."""
    programs = min(parameters.programs_per_multiprocessor, 5)
    most = REGISTERS // (programs * 32 * parameters.num_warps)
    return min(most // REGISTER_UNIT * REGISTER_UNIT, 255)


def prefill(
    head_dim: int, element_bytes: int, capability: tuple[int, int], int8: bool
) -> PrefillParameters:
    """Parameters of `paged_prefill`; arguments as for `decode`. The query tile does not depend on
    int8. Padded heads take registers as codes do, so on 9.0 they have the same parameters."""
    is_padded = head_dim != padded_head_dim(head_dim)
    parameters = _row(INT8_PREFILL if int8 else PREFILL, head_dim, element_bytes, capability)
    if parameters.overlap and is_padded:
        parameters = _row(INT8_PREFILL, head_dim, element_bytes, capability)
    return parameters


def linear(rows: int, element_bytes: int, capability: tuple[int, int]) -> LinearParameters:
    """Parameters of `int8_linear` for this number of rows."""
    ways = linear_ways(element_bytes, capability)
    return next((way for way in ways if rows <= way.row_tile), ways[-1])


def linear_ways(element_bytes: int, capability: tuple[int, int]) -> list[LinearParameters]:
    """All parameters that `linear` may choose, each for more rows than the one before."""
    hopper = (element_bytes, 90)
    return LINEAR[
        hopper if _has_shared_memory(capability) and hopper in LINEAR else (element_bytes, 80)
    ]


def quantized_linear(
    rows: int, element_bytes: int, capability: tuple[int, int], is_float: bool
) -> QuantizedParameters:
    """Parameters of `quantized_linear` for this number of rows.

    is_float: whether codes are floats.
    """
    ways = quantized_ways(element_bytes, capability, is_float)
    return next((way for way in ways if rows <= way.row_tile), ways[-1])


def quantized_ways(
    element_bytes: int, capability: tuple[int, int], is_float: bool = False
) -> list[QuantizedParameters]:
    """All parameters that `quantized_linear` may choose, each for more rows than the one before.
    Their numbers of rows do not depend on `is_float`."""
    table = QUANTIZED_FLOATS if is_float else QUANTIZED
    hopper = (element_bytes, 90)
    return table[
        hopper if _has_shared_memory(capability) and hopper in table else (element_bytes, 80)
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
    """Whether the GPU has as much shared memory as the rows for 9.0 need."""
    return (9, 0) <= capability < (12, 0)
