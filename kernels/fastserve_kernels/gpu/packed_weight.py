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
from fastserve_kernels.gpu.widened_codes import exact_codes
from fastserve_kernels.quantized_weight import QuantizedWeight

COLUMNS_MULTIPLE = 128
"""Packed rows have a multiple of so many columns: all of a block, and of a group."""
ROWS_MULTIPLE = 128
"""Packed weights have a multiple of so many rows, so that tiles need no mask."""
_MOST_DEPTH = 32  # columns of a product; with more, `sums_of_tile` would need more registers
_FEWEST_COLUMNS = 16  # of a group, and of a product of the tensor cores
_NAN_CODE = 0x7F  # of float8_e4m3fn, without its sign
_ROW_TILE = 32


@dataclass(frozen=True)
class Layout:
    """How codes are stored.

    bits: of a code, 4 or 8. Codes of 5 and 6 bits take 8.
    is_float: whether codes are float8_e4m3fn.
    is_full: whether codes use all of 8 bits, as integers.
    group: columns that share a scale: 16, 32, 64 or 128.
    center: the code of weight 0, without an offset.
    """

    bits: int
    is_float: bool
    is_full: bool
    group: int
    center: int

    @classmethod
    def of(cls, weight: QuantizedWeight) -> Layout | None:
        """The layout for a weight; None if it has groups that the kernels do not know."""
        group = COLUMNS_MULTIPLE
        if weight.group < weight.shape[1]:
            group = math.gcd(weight.group, COLUMNS_MULTIPLE)
        if group < _FEWEST_COLUMNS:
            return None
        is_float = weight.codes.dtype == torch.float8_e4m3fn
        is_full = weight.bits == 8 and not is_float
        return cls(4 if weight.bits == 4 else 8, is_float, is_full, group, weight.center)

    @property
    def depth(self) -> int:
        """Columns that the kernels multiply at a time."""
        return min(self.group, _MOST_DEPTH)

    @property
    def places(self) -> int:
        """Codes in 16 bits."""
        return 16 // self.bits

    @property
    def constants(self) -> dict[str, int | bool]:
        """Arguments of the kernels, which are compiled for them."""
        return {name.upper(): value for name, value in asdict(self).items()} | {"DEPTH": self.depth}


@dataclass(frozen=True)
class PackedWeight:
    """``weight[n, k] = scale[k // group, n] · (code[n, k] - center) + offset[k // group, n]``.

    codes: int16 ``[out, columns · bits / 16]``, with rows and columns added up to multiples. Each
        block of `depth` has the codes of `depth · places` columns. An int16 has, from the lowest
        bits up, those of columns c, c + depth, c + 2 · depth …. See `_packed` for the order of c.
    scales: float32 ``[groups, out]``; or int32, with a scale in float16 in the lower half and an
        offset in float16 in the upper half.
    offsets: float32 ``[groups, out]``; None: they are with the scales, or all 0.
    """

    layout: Layout
    codes: Tensor
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
        codes = torch.cat([_packed(weight.codes, layout) for weight in moved])
        scales = torch.cat([_scales(weight, layout) for weight in moved])
        scales = _by_group(scales, layout, in_features)
        offsets = None
        if any(weight.offsets is not None for weight in moved):
            offsets = torch.cat([_offsets(weight) for weight in moved])
            offsets = _by_group(offsets, layout, in_features)
            if _is_half(scales) and _is_half(offsets):
                scales = torch.stack([scales.half(), offsets.half()], 2).view(torch.int32)[:, :, 0]
                offsets = None
        out_features = len(codes)
        codes = F.pad(codes, (0, 0, 0, -out_features % ROWS_MULTIPLE))
        return cls(layout, codes, scales, offsets, out_features, in_features)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.codes.nbytes + self.scales.nbytes + offsets

    def dequantized(self, dtype: torch.dtype, rows: slice | Tensor) -> Tensor:
        """Some rows, by a slice or by their numbers, int64 ``[n]``: ``[n, in]``.

        Grid: (tiles of rows, blocks of columns).
        """
        ids, start = (rows, 0) if isinstance(rows, Tensor) else (None, rows.start)
        count = rows.stop - start if isinstance(rows, slice) else len(rows)
        y = torch.empty((count, self.in_features), dtype=dtype, device=self.codes.device)
        if y.numel() == 0:
            return y
        row_codes = self.codes.shape[1]
        _dequantize_rows[(cdiv(count, _ROW_TILE), row_codes // self.layout.depth)](
            self.codes, self.scales, self.offsets, ids, y,
            start, count, self.in_features, row_codes, self.scales.shape[1],
            **self.layout.constants, ROW_TILE=_ROW_TILE, num_warps=2,
        )  # fmt: skip
        return y


def _packed(codes: Tensor, layout: Layout) -> Tensor:
    """``[out, in]`` of 8 bits each -> int16 ``[out, columns · bits / 16]``."""
    codes = codes.view(torch.uint8)
    codes = F.pad(codes, (0, -codes.shape[1] % COLUMNS_MULTIPLE))
    by_place = codes.unflatten(1, (-1, layout.places, layout.depth))
    packed = torch.zeros_like(by_place[:, :, 0], dtype=torch.int32)
    for place in range(layout.places):
        packed |= by_place[:, :, place].int() << (layout.bits * place)
    # A thread of the tensor cores' product needs pairs of columns that are 8 apart: 0, 1, 8, 9, 16,
    # 17 …. They are neighbours in memory, so that it loads up to 16 bytes at once.
    pairs: Tensor = packed.to(torch.int16).unflatten(2, (-1, 4, 2))
    return pairs.transpose(2, 3).flatten(1)


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
    """Scales of groups, and the weights of code 0, if `CENTER` is the code of weight 0 without an
    offset."""
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


@triton.jit
def load_codes(block, mask, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """int16 ``[ROWS, DEPTH]``, with columns in order. block: pointers ``[ROWS, 1]`` to a block."""
    codes = tl.load(block + tl.arange(0, DEPTH)[None, :], mask)
    pairs = tl.permute(tl.reshape(codes, ROWS, 4, DEPTH // 8, 2), 0, 2, 1, 3)
    return tl.reshape(pairs, ROWS, DEPTH)


@triton.jit(do_not_specialize=["start", "count"])
def _dequantize_rows(
    codes, scales, offsets, ids, y, start, count, in_features, row_codes, row_scales,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_FULL: tl.constexpr, GROUP: tl.constexpr,
    CENTER: tl.constexpr, DEPTH: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    PLACES: tl.constexpr = 16 // BITS
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    block = tl.program_id(1)
    has_row = row < count
    # A tile's rows after the last stand for row 0, as codes and numbers may end before them.
    if ids is None:
        source = tl.where(has_row, start + row, 0).to(tl.int64)
    else:
        source = tl.load(ids + row, has_row, other=0)
    packed = load_codes(codes + source[:, None] * row_codes + block * DEPTH, None, ROW_TILE, DEPTH)
    for place in tl.static_range(PLACES):
        begin = (block * PLACES + place) * DEPTH
        if place * DEPTH % GROUP == 0:
            numbers = (begin // GROUP).to(tl.int64) * row_scales + source[:, None]
            scale, low = load_numbers(scales, offsets, numbers, CENTER)
        weight = exact_codes(packed, place, BITS, IS_FLOAT) * scale + low
        at = begin + tl.arange(0, DEPTH)
        tl.store(
            y + row.to(tl.int64)[:, None] * in_features + at[None, :],
            weight.to(y.dtype.element_ty), has_row[:, None] & (at < in_features)[None, :],
        )  # fmt: skip
