"""MXFP4 (OCP Microscaling Formats 1.0) as `QuantizedWeight`s.

A number has 4 bits, and 32 neighbours share a power of 2. Twice each number is whole, so a code of
5 bits has it exactly.
"""

from __future__ import annotations

import torch
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CENTER = 12
FP4_CODES = torch.tensor(
    [_CENTER + sign * int(2 * one) for sign in (1, -1) for one in _MAGNITUDES], dtype=torch.uint8
)
"""For each of the 16 numbers the code of a `QuantizedWeight`."""
# Of each byte, whose lower half comes first.
_PAIRS = torch.stack([FP4_CODES.repeat(16), FP4_CODES.repeat_interleave(16)], dim=1)
# Half of each scale.
_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 128).bfloat16()


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """A matrix as gpt-oss's checkpoints have it: ``[rows, groups · 32]``.

    blocks: uint8 ``[rows, groups, 16]``, two numbers in each.
    scales: uint8 ``[rows, groups]``, exponents of 2, plus 127.
    """
    return fp4_weight("MXFP4", _PAIRS[blocks.int()].flatten(1), scales)


def fp4_weight(kind: str, codes: Tensor, scales: Tensor) -> QuantizedWeight:
    """codes: of `FP4_CODES`, ``[rows, groups · 32]``. scales: as above."""
    return QuantizedWeight(kind, codes, 5, 32, GroupNumbers(_POWERS[scales.int()]), center=_CENTER)
