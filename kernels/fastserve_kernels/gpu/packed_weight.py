"""Weights of few bits as a GPU's kernels read them, and how their codes become numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.launch_parameters import cdiv
from fastserve_kernels.quantized_weight import QuantizedWeight

BLOCK_WORDS = 16
"""Words of a block, which a row has side by side: 128 codes of 4 bits, or 64 of 8."""
COLUMNS_MULTIPLE = 128
"""Packed rows have a multiple of so many columns: one block of 4 bits, or two of 8."""
ROWS_MULTIPLE = 128
"""Packed weights have a multiple of so many rows, so that tiles need no mask."""
_NAN_CODE = 0x7F  # of float8_e4m3fn, without its sign
_ROW_TILE = 32


@dataclass(frozen=True)
class Layout:
    """How codes are stored.

    bits: of a code, 4 or 8. Codes of 5 and 6 bits take 8.
    is_float: whether codes are float8_e4m3fn.
    group: columns that share a scale: 16, 32, 64 or 128.
    center: the code of weight 0, without an offset.
    is_wide: whether scales are so large that `dequantize` must multiply twice.
    """

    bits: int
    is_float: bool
    group: int
    center: int
    is_wide: bool

    @classmethod
    def of(cls, weight: QuantizedWeight) -> Layout | None:
        """The layout for a weight; None if it has groups that the kernels do not know."""
        group = COLUMNS_MULTIPLE
        if weight.group < weight.shape[1]:
            group = math.gcd(weight.group, COLUMNS_MULTIPLE)
        if group < BLOCK_WORDS:
            return None
        bits = 4 if weight.bits == 4 else 8
        is_float = weight.codes.dtype == torch.float8_e4m3fn
        # `dequantize` multiplies scales by 2^power. The result must be a float32.
        power = 120 if is_float else 125 + bits
        is_wide = not bool((weight.scales.numbers().abs() < 2.0 ** (127 - power)).all())
        return cls(bits, is_float, group, weight.center, is_wide)

    @property
    def constants(self) -> dict[str, int | bool]:
        """Arguments of the kernels, which are compiled for them."""
        return {name.upper(): value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class PackedWeight:
    """``weight[n, k] = scale[k // group, n] · (code[n, k] - center) + offset[k // group, n]``.

    words: int32 ``[out, columns · bits / 32]``, with rows and columns added up to multiples. Word j
        of a block has the codes of its columns j, j + 16, j + 32 …, from the lowest bits up.
    scales: float32 ``[groups, out]``; or int32, with a scale in float16 in the lower half and an
        offset in float16 in the upper half.
    offsets: float32 ``[groups, out]``; None: they are with the scales, or all 0.
    """

    layout: Layout
    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    out_features: int
    in_features: int

    @classmethod
    def of(
        cls, weights: Sequence[QuantizedWeight], layout: Layout, device: torch.device
    ) -> PackedWeight:
        """Packs weights of one layout, one below the other.

        A scale and an offset take 4 bytes a group if float16 holds both exactly, and else 8, as for
        K-quants, whose numbers are products. A scale without an offset takes 4.
        """
        in_features = weights[0].shape[1]
        moved = [weight.to(device) for weight in weights]
        words = torch.cat([_words(weight.codes, layout.bits) for weight in moved])
        scales = torch.cat([_scales(weight, layout) for weight in moved])
        scales = _by_group(scales, layout, in_features)
        offsets = None
        if any(weight.offsets is not None for weight in moved):
            offsets = torch.cat([_offsets(weight) for weight in moved])
            offsets = _by_group(offsets, layout, in_features)
            if _is_half(scales) and _is_half(offsets):
                scales = torch.stack([scales.half(), offsets.half()], 2).view(torch.int32)[:, :, 0]
                offsets = None
        out_features = len(words)
        words = F.pad(words, (0, 0, 0, -out_features % ROWS_MULTIPLE))
        return cls(layout, words, scales, offsets, out_features, in_features)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.words.nbytes + self.scales.nbytes + offsets

    def dequantized(self, dtype: torch.dtype, rows: slice | Tensor) -> Tensor:
        """Some rows, by a slice or by their numbers, int64 ``[n]``: ``[n, in]``.

        Grid: (tiles of rows, blocks of columns).
        """
        ids, start = (rows, 0) if isinstance(rows, Tensor) else (None, rows.start)
        count = rows.stop - start if isinstance(rows, slice) else len(rows)
        y = torch.empty((count, self.in_features), dtype=dtype, device=self.words.device)
        if y.numel() == 0:
            return y
        row_words = self.words.shape[1]
        _dequantize_rows[(cdiv(count, _ROW_TILE), row_words // BLOCK_WORDS)](
            self.words, self.scales, self.offsets, ids, y,
            start, count, self.in_features, row_words, self.scales.shape[1],
            **self.layout.constants, BLOCK_WORDS=BLOCK_WORDS, ROW_TILE=_ROW_TILE, num_warps=2,
        )  # fmt: skip
        return y


def _words(codes: Tensor, bits: int) -> Tensor:
    """``[out, in]`` of 8 bits each -> int32 ``[out, words]``."""
    codes = codes.view(torch.uint8)
    codes = F.pad(codes, (0, -codes.shape[1] % COLUMNS_MULTIPLE))
    by_place = codes.unflatten(1, (-1, 32 // bits, BLOCK_WORDS))
    words = torch.zeros_like(by_place[:, :, 0], dtype=torch.int32)
    for place in range(32 // bits):
        words |= by_place[:, :, place].int() << (bits * place)
    return words.flatten(1)


def _scales(weight: QuantizedWeight, layout: Layout) -> Tensor:
    """float32 ``[out, groups]`` of the weight's own groups."""
    scales = weight.scales.numbers()
    if not layout.is_float:
        return scales
    # The kernels widen the codes of NaN to numbers.
    is_nan = weight.codes.view(torch.uint8).bitwise_and(_NAN_CODE) == _NAN_CODE
    return scales.masked_fill(is_nan.unflatten(1, (-1, weight.group)).any(2), math.nan)


def _offsets(weight: QuantizedWeight) -> Tensor:
    if weight.offsets is None:
        return torch.zeros_like(weight.scales.numbers())
    return weight.offsets.numbers()


def _by_group(numbers: Tensor, layout: Layout, in_features: int) -> Tensor:
    """``[out, groups]`` of any groups -> ``[groups, out]`` of the layout's, padded, contiguous."""
    columns = -(-in_features // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
    whole = numbers.shape[1] * layout.group
    times = columns // whole if numbers.shape[1] == 1 else in_features // whole
    # `F.pad` keeps the order in memory where it adds nothing.
    numbers = numbers.repeat_interleave(times, 1).t().clone(memory_format=torch.contiguous_format)
    more_groups = columns // layout.group - len(numbers)
    return F.pad(numbers, (0, -numbers.shape[1] % ROWS_MULTIPLE, 0, more_groups))


def _is_half(numbers: Tensor) -> bool:
    return torch.equal(numbers.half().float(), numbers)


@triton.jit
def load_numbers(scales, offsets, at, CENTER: tl.constexpr, mask=None):
    """Loads what `dequantize` needs of groups: their scales, and the weight of code 0."""
    scale = tl.load(scales + at, mask)
    if scale.dtype == tl.int32:
        low = (scale >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = (scale & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif offsets is not None:
        low = tl.load(offsets + at, mask)
    else:
        low = tl.zeros_like(scale)
    if CENTER != 0:
        low -= scale * CENTER
    return scale, low


# A code becomes a float32 by a shift and a mask. Where it lies then, it is the number times
# 2^-POWER, and mostly denormal. The product with scale · 2^POWER makes up for that. To convert
# integers would take several times as long, and most of the kernels' instructions are these.
@triton.jit
def dequantize(
    words, scale, low, PLACE: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    IS_WIDE: tl.constexpr,
):  # fmt: skip
    """float32 ``scale · code + low``, with the code that each word has at a place, from 0 up."""
    POWER: tl.constexpr = 120 if IS_FLOAT else 125 + BITS
    if IS_FLOAT:
        # The sign, then copies of it that the mask removes, the exponent's 4 bits, which end where
        # those of a float32 do, and the mantissa's 3.
        bits = ((words << (24 - 8 * PLACE)) >> 4) & (0x87F00000 - 0x100000000)
    else:
        # The code's highest bit is the exponent's lowest: numbers with an exponent of 1 are as far
        # apart as denormal ones, and follow them.
        LEFT: tl.constexpr = 24 - BITS - BITS * PLACE
        bits = words << LEFT if LEFT >= 0 else words >> -LEFT
        bits = bits & (((1 << BITS) - 1) << (24 - BITS))
    codes = bits.to(tl.float32, bitcast=True)
    if IS_WIDE:
        return codes * 2.0**100 * (scale * 2.0 ** (POWER - 100)) + low
    return codes * (scale * 2.0**60 * 2.0 ** (POWER - 60)) + low


@triton.jit(do_not_specialize=["start", "count"])
def _dequantize_rows(
    words, scales, offsets, ids, y, start, count, in_features, row_words, row_scales,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, GROUP: tl.constexpr, CENTER: tl.constexpr,
    IS_WIDE: tl.constexpr, BLOCK_WORDS: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    block = tl.program_id(1)
    inner = tl.arange(0, BLOCK_WORDS)
    has_row = row < count
    # A tile's rows after the last stand for row 0, as words and numbers may end before them.
    if ids is None:
        source = tl.where(has_row, start + row, 0).to(tl.int64)
    else:
        source = tl.load(ids + row, has_row, other=0)
    codes = tl.load(words + source[:, None] * row_words + block * BLOCK_WORDS + inner[None, :])
    for place in tl.static_range(32 // BITS):
        begin = block * (32 // BITS * BLOCK_WORDS) + place * BLOCK_WORDS
        if place * BLOCK_WORDS % GROUP == 0:
            numbers = (begin // GROUP).to(tl.int64) * row_scales + source[:, None]
            scale, low = load_numbers(scales, offsets, numbers, CENTER)
        weight = dequantize(codes, scale, low, place, BITS, IS_FLOAT, IS_WIDE)
        at = begin + inner
        tl.store(
            y + row.to(tl.int64)[:, None] * in_features + at[None, :],
            weight.to(y.dtype.element_ty), has_row[:, None] & (at < in_features)[None, :],
        )  # fmt: skip
