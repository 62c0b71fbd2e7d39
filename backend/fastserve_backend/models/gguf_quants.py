"""GGUF's types of matrices as `QuantizedWeight`s.

A row is a list of blocks, of 32 or 256 columns each. The layouts are those of llama.cpp's
ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight
from torch import Tensor

from fastserve_backend.models.mxfp4 import FP4_CODES, fp4_weight

_GROUP = 32  # columns of a group, but 16 in Q6_K
_SUPERBLOCK = 256


@dataclass(frozen=True)
class GGUFQuant:
    """A type of matrix.

    columns: of a block.
    num_bytes: of a block.
    """

    columns: int
    num_bytes: int
    _read: Callable[[str, Tensor], QuantizedWeight]

    def weight(self, kind: str, blocks: Tensor) -> QuantizedWeight:
        """The weight [rows, blocks · columns] of uint8 [rows, blocks, num_bytes]."""
        return self._read(kind, blocks)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at byte `start`, which is even, of each block: [rows, blocks]."""
    return blocks.view(torch.float16)[..., start // 2].contiguous()


def _nibbles(packed: Tensor) -> Tensor:
    """The lower halves of bytes, then the upper ones: [..., n] -> [..., 2, n]."""
    halves = packed.new_empty((*packed.shape[:-1], 2, packed.shape[-1]))
    torch.bitwise_and(packed, 15, out=halves[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=halves[..., 1, :])
    return halves


def _bits(packed: Tensor, count: int) -> Tensor:
    """Numbers of `count` bits, from the lowest bits of all bytes on: [..., n] -> [..., 8 / count,
    n]."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)[:, None]
    numbers: Tensor = (packed[..., None, :] >> shifts) & (2**count - 1)
    return numbers


def _simple(bits: int, *, has_offset: bool) -> Callable[[str, Tensor], QuantizedWeight]:
    """Reads blocks of 32 codes of 4 or 5 bits, with a scale and perhaps an offset."""

    def read(kind: str, blocks: Tensor) -> QuantizedWeight:
        start = 4 if has_offset else 2
        codes = _nibbles(blocks[..., -16:]).flatten(2)
        if bits == 5:
            shifts = torch.arange(8, dtype=torch.uint8)
            high = (blocks[..., start : start + 4, None] >> shifts) & 1
            codes |= high.flatten(2) << 4
        return QuantizedWeight(
            kind,
            codes.flatten(1),
            bits,
            _GROUP,
            GroupNumbers(_halves(blocks, 0)),
            GroupNumbers(_halves(blocks, 2)) if has_offset else None,
            center=0 if has_offset else 2 ** (bits - 1),
        )

    return read


def _q8_0(kind: str, blocks: Tensor) -> QuantizedWeight:
    codes = blocks[..., 2:] ^ 128  # from int8 to uint8, less 128
    scales = GroupNumbers(_halves(blocks, 0))
    return QuantizedWeight(kind, codes.flatten(1), 8, _GROUP, scales, center=128)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight numbers of 6 bits each: uint8 [..., 12] -> twice [..., 8]."""
    low, middle, high = packed.split(4, dim=-1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=-1)
    return scales, minima


def _k_quant(bits: int) -> Callable[[str, Tensor], QuantizedWeight]:
    """Reads superblocks of eight groups with codes of 4 or 5 bits."""

    def read(kind: str, blocks: Tensor) -> QuantizedWeight:
        scales, minima = _scales_and_minima(blocks[..., 4:16])
        codes = _nibbles(blocks[..., -128:].unflatten(2, (4, 32))).flatten(2, 3)
        if bits == 5:
            codes |= _bits(blocks[..., 16:48], 1) << 4
        return QuantizedWeight(
            kind,
            codes.flatten(1),
            bits,
            _GROUP,
            GroupNumbers(scales.flatten(1), _halves(blocks, 0)),
            GroupNumbers(minima.flatten(1), -_halves(blocks, 2)),
        )

    return read


def _q6_k(kind: str, blocks: Tensor) -> QuantizedWeight:
    low, high, scales, _ = blocks.split((128, 64, 16, 2), dim=-1)
    codes = _nibbles(low.unflatten(2, (2, 64))).flatten(2)
    codes |= _bits(high.unflatten(2, (2, 32)), 2).flatten(2) << 4
    numbers = GroupNumbers(scales.contiguous().view(torch.int8).flatten(1), _halves(blocks, 208))
    return QuantizedWeight(kind, codes.flatten(1), 6, 16, numbers, center=32)


def _mxfp4(kind: str, blocks: Tensor) -> QuantizedWeight:
    codes = FP4_CODES[_nibbles(blocks[..., 1:]).flatten(1).int()]
    return fp4_weight(kind, codes, blocks[..., 0])


QUANTS: Mapping[str, GGUFQuant] = {
    "Q4_0": GGUFQuant(_GROUP, 18, _simple(4, has_offset=False)),
    "Q4_1": GGUFQuant(_GROUP, 20, _simple(4, has_offset=True)),
    "Q5_0": GGUFQuant(_GROUP, 22, _simple(5, has_offset=False)),
    "Q5_1": GGUFQuant(_GROUP, 24, _simple(5, has_offset=True)),
    "Q8_0": GGUFQuant(_GROUP, 34, _q8_0),
    "Q4_K": GGUFQuant(_SUPERBLOCK, 144, _k_quant(4)),
    "Q5_K": GGUFQuant(_SUPERBLOCK, 176, _k_quant(5)),
    "Q6_K": GGUFQuant(_SUPERBLOCK, 210, _q6_k),
    "MXFP4": GGUFQuant(_GROUP, 17, _mxfp4),
}
"""By GGUF's names."""
