"""Rounds the weights of linear layers to INT4 when they are loaded (`quantization: int4`)."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import torch
from fastserve_kernels.quantized_weight import QuantizedWeight
from fastserve_kernels.weight_quantization import quantize_groups
from torch import Tensor

from fastserve_backend.checkpoints.errors import ModelError

_GROUPS = (64, 32, 16)
# So many rows are widened to float32 at a time: few enough for a processor's cache.
_ROWS = 256


def int4_group(layers: Iterable[str], columns: slice) -> int:
    """How many columns of a rank's part share numbers: 64, or fewer so that none are left over.

    Args:
        layers: names, for messages.

    Raises:
        ModelError: the part cannot be divided into groups.
    """
    bounds = gcd(columns.start, columns.stop)
    group = next((one for one in _GROUPS if bounds % one == 0), None)
    if group is None:
        raise ModelError(
            f"quantization int4 has groups of {', '.join(map(str, _GROUPS))} columns, which do not "
            f"fit columns {columns.start} to {columns.stop} of {', '.join(layers)}; use "
            "quantization int8, or another tensor_parallel_size if it is above 1"
        )
    return group


class Int4Rounding:
    """Rounds weights, and sums up by how much that changes them."""

    def __init__(self) -> None:
        self._squares = self._changes = 0.0

    @property
    def relative_error(self) -> float | None:
        """The root mean square change of all weights, relative to theirs. None: nothing was
        rounded."""
        return (self._changes / self._squares) ** 0.5 if self._squares else None

    def __call__(self, weight: Tensor, group: int) -> QuantizedWeight:
        """weight [out, in], with groups of so many columns."""
        rounded = quantize_groups(weight, bits=4, group=group)
        for start in range(0, len(weight), _ROWS):
            rows = slice(start, start + _ROWS)
            exact = weight[rows].float()
            change = rounded.part(rows).dequantized(torch.float32).sub_(exact)
            self._squares += float(torch.linalg.vector_norm(exact)) ** 2
            self._changes += float(torch.linalg.vector_norm(change)) ** 2
        return rounded
