"""Packs weights of few bits for the compiled kernels, beside others in the model's own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastserve_kernels.cpu.compiled import CompiledKernels
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight

# As in quantized_panels.h.
_BLOCK = 16
PIECE_SIZE = 10
"""Numbers of a StoredPiece."""
_PLAIN, _FLOAT8 = 0, 9
_NUMBERS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.int8: 4}
_INT8 = torch.iinfo(torch.int8)


@dataclass(frozen=True)
class QuantizedPanels:
    """Packed weights [out, in], one below the other.

    pieces: int64 [weights, PIECE_SIZE], a StoredPiece of quantized_panels.h for each weight. They
        refer to the memory of `panels`.
    """

    pieces: Tensor
    panels: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(panels.nbytes for panels in self.panels)


def pack(
    kernels: CompiledKernels, weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype
) -> QuantizedPanels:
    """Pack weights for x of `dtype`, without loss. Tensors are of `dtype`.

    A weight takes the memory of its codes and numbers. Codes of less than 4 bits take 4, and one
    that the kernels do not know is dequantized.
    """
    packed = [_pack_one(kernels, weight, dtype) for weight in weights]
    return QuantizedPanels(
        pieces=torch.stack([piece for piece, _ in packed]),
        panels=tuple(panels for _, panels in packed),
    )


def _pack_one(
    kernels: CompiledKernels, weight: QuantizedWeight | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A piece and its panels."""
    if isinstance(weight, QuantizedWeight) and not _is_known(weight):
        weight = weight.dequantized(dtype)
    out, size = weight.shape
    if isinstance(weight, Tensor):
        panels = kernels.pack_weight(weight if weight.stride(1) == 1 else weight.contiguous())
        return torch.tensor([panels.data_ptr(), out, _PLAIN] + [0] * (PIECE_SIZE - 3)), panels
    # The numbers of a superblock are side by side, so scales and offsets have the same ones.
    counts = {one.groups_of_step for one in (weight.scales, weight.offsets) if one is not None}
    groups_of_step = counts.pop() if len(counts) == 1 else 1
    scales, scale_steps = _stored(weight.scales, groups_of_step)
    offsets, offset_steps = _stored(weight.offsets, groups_of_step)
    numbers = (scales, scale_steps, offsets, offset_steps)
    is_float8 = weight.codes.dtype == torch.float8_e4m3fn
    piece = torch.tensor(
        [0, out, _FLOAT8 if is_float8 else weight.bits, weight.center, weight.group]
        + [groups_of_step]
        + [0 if one is None else _NUMBERS[one.dtype] for one in numbers]
    )
    panels = torch.empty(kernels.quantized_bytes(piece, size, dtype), dtype=torch.uint8)
    codes = weight.codes if weight.codes.stride(1) == 1 else weight.codes.contiguous()
    kernels.pack_quantized(piece, codes, numbers, dtype, panels)
    piece[0] = panels.data_ptr()
    return piece, panels


def _is_known(weight: QuantizedWeight) -> bool:
    size = weight.shape[1]
    if size == 0 or (weight.group != size and weight.group % _BLOCK):
        return False
    if weight.codes.dtype == torch.float8_e4m3fn:
        # The kernels take a NaN for a number.
        return not bool(((weight.codes.view(torch.uint8) & 0x7F) == 0x7F).any())
    return True


def _stored(
    numbers: GroupNumbers | None, groups_of_step: int
) -> tuple[Tensor | None, Tensor | None]:
    """The same numbers in as few bytes as hold them: values, and steps for bytes of superblocks."""
    if numbers is None:
        return None, None
    values, steps = numbers.values, numbers.steps
    if steps is None or groups_of_step == 1 or not _fit_int8(values):
        return _narrowed(numbers.numbers()), None
    return values.to(torch.int8).contiguous(), _narrowed(steps)


def _fit_int8(values: Tensor) -> bool:
    if values.is_floating_point():
        return False
    low, high = (int(one) for one in values.aminmax())  # a uint8 is not compared with -128
    return low >= _INT8.min and high <= _INT8.max


def _narrowed(numbers: Tensor) -> Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        narrow = numbers.to(dtype)
        if torch.equal(narrow.float(), numbers.float()):
            return narrow.contiguous()
    return numbers.float().contiguous()
