"""Rows whose contexts begin with the same blocks: decodes on a CPU read such blocks once.

Jobs that begin alike refer to the same blocks. So block tables alone tell what they have in common.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class CommonBeginnings(NamedTuple):
    """An order of B rows in which those that begin alike are neighbours.

    order: int32 [B], contiguous, the row at each place.
    common: int32 [B], contiguous, how many positions, from position 0 on, the row at each place and
        the one before it have in the same blocks. No more than the context of either.
    """

    order: Tensor
    common: Tensor


def common_beginnings(
    block_tables: Array,
    table_starts: Array,
    context_lens: Array,
    block_size: int,
    window: int | None = None,
) -> CommonBeginnings:
    """What contexts have in common, in whole blocks.

    Args:
        block_tables, table_starts: int32 [N] and [B], see `ops`.
        context_lens: int32 [B]; 0 for padding.
        window: of the layers. Rows that do not see all of their context have nothing in common.
    """
    count = len(context_lens)
    order, common = np.arange(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
    num_blocks = context_lens // block_size
    if window is not None:
        num_blocks = np.where(context_lens <= window, num_blocks, 0)
    with_blocks = table_starts[num_blocks > 0]
    if len(set(block_tables[with_blocks].tolist())) < len(with_blocks):  # else the usual batch
        spans = zip(table_starts.tolist(), num_blocks.tolist(), strict=True)
        tables = [block_tables[start : start + length] for start, length in spans]
        # As bytes, tables that begin alike are neighbours too.
        order[:] = sorted(order.tolist(), key=[table.tobytes() for table in tables].__getitem__)
        ordered = [tables[row] for row in order.tolist()]
        for place in range(1, count):
            common[place] = _num_equal(ordered[place - 1], ordered[place]) * block_size
    return CommonBeginnings(torch.from_numpy(order), torch.from_numpy(common))


def _num_equal(first: Array, second: Array) -> int:
    """Length of the longest common prefix."""
    length = min(len(first), len(second))
    if not length or first[0] != second[0]:
        return 0
    differ = first[:length] != second[:length]
    end = int(differ.argmax())
    return end if differ[end] else length
