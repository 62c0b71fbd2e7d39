"""Memory that kernels of earlier launches may still be writing."""

from __future__ import annotations

import numpy as np

from ptx.errors import MachineError
from ptx.formats import Array


class EarlierLaunches:
    """Tensors to which something was launched to write since the last launch that started when all
    before it had ended. A kernel that starts while earlier ones run must not load from them before
    it has waited."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}  # ends by starts

    def note(self, start: int, num_bytes: int) -> None:
        if num_bytes:
            self._ranges[start] = max(start + num_bytes, self._ranges.get(start, 0))

    def synchronize(self) -> None:
        """All of them have ended."""
        self._ranges.clear()

    def check(self, addresses: Array, width: int) -> None:
        """
        Raises:
            MachineError: an earlier launch may still write there.
        """
        for start, end in self._ranges.items():
            written = (addresses + width > start) & (addresses < end)
            if written.any():
                raise MachineError(
                    f"{int(np.count_nonzero(written))} threads load what an earlier launch writes, "
                    "before griddepcontrol.wait"
                )
