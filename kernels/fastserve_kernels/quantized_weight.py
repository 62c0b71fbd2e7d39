"""Weights of few bits, as checkpoints store them: codes, and numbers that groups of them share.

Each format (GGUF's Q4_1, AWQ, FP8 …) is read into this one form. So kernels need not know formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# So many rows are widened to float32 at a time: few enough for a processor's cache.
_ROWS = 256


@dataclass(frozen=True)
class GroupNumbers:
    """One number for each row and group of neighbouring columns.

    values: ``[out, groups]``, floating point; or integers that `steps` multiplies.
    steps: floating point ``[out, groups / n]``, one for each n neighbouring groups; None: `values`
        are the numbers.
    """

    values: Tensor
    steps: Tensor | None = None

    def numbers(self) -> Tensor:
        """float32 ``[out, groups]``."""
        if self.steps is None:
            return self.values.float()
        return self.values.float() * self.steps.float().repeat_interleave(self.groups_of_step, 1)

    @property
    def groups_of_step(self) -> int:
        """Groups that share a step; 1 without steps."""
        return 1 if self.steps is None else self.values.shape[1] // self.steps.shape[1]

    def part(self, rows: slice | Tensor, groups: slice) -> GroupNumbers:
        """The numbers of some rows and groups. The groups of a step must stay together."""
        if self.steps is None:
            return GroupNumbers(self.values[rows, groups])
        count = self.groups_of_step
        steps = slice(groups.start // count, -(-groups.stop // count))
        return GroupNumbers(self.values[rows, groups], self.steps[rows, steps])


@dataclass(frozen=True)
class QuantizedWeight:
    """``weight[n, k] = scales[n, k // group] · (codes[n, k] - center) + offsets[n, k // group]``.

    format: its name, for messages.
    codes: uint8 ``[out, in]``, each less than ``2**bits``; or float8_e4m3fn, with 8 bits and no
        center.
    bits: 4, 5, 6 or 8.
    group: columns of a group. It divides `in`.
    offsets: None: all 0.
    order: int64 ``[in]``: column k here is column order[k] of the layer, so that columns with the
        same numbers are neighbours. None: columns are in the layer's order.
    """

    format: str
    codes: Tensor
    bits: int
    group: int
    scales: GroupNumbers
    offsets: GroupNumbers | None = None
    center: int = 0
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        out, size = self.codes.shape
        return out, size

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """``[out, in]``, computed in float32 and then rounded to `dtype`; columns are in the
        layer's order."""
        out = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        for start in range(0, len(out), _ROWS):
            some = self.part(slice(start, start + _ROWS))
            by_group = some.codes.float().sub_(some.center).unflatten(1, (-1, self.group))
            by_group *= some.scales.numbers()[..., None]
            if some.offsets is not None:
                by_group += some.offsets.numbers()[..., None]
            columns = slice(None) if self.order is None else self.order
            out[start : start + _ROWS, columns] = by_group.flatten(1).to(dtype)
        return out

    def part(self, rows: slice | Tensor, columns: slice | None = None) -> QuantizedWeight:
        """Some rows (a slice, or their numbers in order) and neighbouring columns.

        Raises:
            ValueError: the columns do not begin and end between groups.
        """
        size = self.shape[1]
        start, stop, _ = (columns or slice(None)).indices(size)
        if self.order is not None and (start, stop) != (0, size):
            raise ValueError(f"columns of a weight in {self.format} are not in the layer's order")
        whole = self.group * max(
            numbers.groups_of_step for numbers in (self.scales, self.offsets) if numbers is not None
        )
        if start % whole or (stop % whole and stop != size):
            raise ValueError(
                f"columns {start} to {stop} of a weight in {self.format} divide a group of {whole}"
            )
        groups = slice(start // self.group, -(-stop // self.group))
        return replace(
            self,
            codes=self.codes[rows, start:stop],
            scales=self.scales.part(rows, groups),
            offsets=None if self.offsets is None else self.offsets.part(rows, groups),
        )

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on another device."""

        def moved(numbers: GroupNumbers) -> GroupNumbers:
            steps = None if numbers.steps is None else numbers.steps.to(device)
            return GroupNumbers(numbers.values.to(device), steps)

        return replace(
            self,
            codes=self.codes.to(device),
            scales=moved(self.scales),
            offsets=None if self.offsets is None else moved(self.offsets),
            order=None if self.order is None else self.order.to(device),
        )


def in_few_bits(
    weights: Sequence[QuantizedWeight | Tensor],
) -> list[QuantizedWeight] | None:
    """The weights, if all are of few bits and have columns in the layer's order; else None."""
    few = [one for one in weights if isinstance(one, QuantizedWeight) and one.order is None]
    return few if len(few) == len(weights) else None


def stacked(
    weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The weights, dequantized and one below the other: ``[sum of all out, in]``, rows
    contiguous."""
    parts = [
        one.to(device).dequantized(dtype)
        if isinstance(one, QuantizedWeight)
        else one.to(device, dtype)
        for one in weights
    ]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole if whole.stride(1) == 1 else whole.contiguous()


def rows_in_turns(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The weights' first rows, then their second ones, and so on.

    weights: of one format and shape, without orders.
    """

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts), dim=1).flatten(0, 1)

    def joined_numbers(parts: Sequence[GroupNumbers]) -> GroupNumbers:
        steps = [one.steps for one in parts if one.steps is not None]
        return GroupNumbers(joined([one.values for one in parts]), joined(steps) if steps else None)

    offsets = [one.offsets for one in weights if one.offsets is not None]
    return replace(
        weights[0],
        codes=joined([one.codes for one in weights]),
        scales=joined_numbers([one.scales for one in weights]),
        offsets=joined_numbers(offsets) if offsets else None,
    )
