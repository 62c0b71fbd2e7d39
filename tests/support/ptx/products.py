"""Products of groups of warps that run while their threads go on (``wgmma``)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ptx.errors import MachineError
from ptx.formats import Array
from ptx.memory import SharedMemory


class Products:
    """Refuses what would disturb a product before a thread has waited for it: the use of its
    results, and writes to its operands, in registers or shared memory.

    A product that adds to the results of an earlier one need not wait for it.
    """

    def __init__(self, shared: SharedMemory, num_groups: int) -> None:
        """num_groups: of four warps, in all programs."""
        self._shared = shared
        self._commits = np.zeros(num_groups, np.int32)
        # Each: places of 16 bytes, the group that reads them, and its commits before the product.
        self._reads: list[tuple[Array, Array, Array]] = []
        # By register, for each group: its commits at the end of the product, or 0.
        self._results: dict[str, Array] = {}
        self._operands: dict[str, Array] = {}
        self._unordered: set[str] = set()  # registers written since the last ``wgmma.fence``

    def fence(self) -> None:
        """Products may use registers that were written before."""
        self._unordered.clear()

    def start(self, groups: Array, results: Iterable[str], operands: Iterable[str]) -> None:
        """Registers of a product of these groups, bool.

        Raises:
            MachineError: one was written after the last fence.
        """
        for known, registers in ((self._results, results), (self._operands, operands)):
            for register in registers:
                if register in self._unordered:
                    raise MachineError(f"{register} was written after the last wgmma.fence")
                ends = known.setdefault(register, np.zeros(len(groups), np.int32))
                ends[groups] = self._commits[groups] + 1

    def read_shared(self, places: Array, groups: Array) -> Array:
        """uint8 [n, 16] of operands in shared memory; ``groups`` has the index of each."""
        data = self._shared.read_by_product(places)
        self._reads.append((places, groups, self._commits[groups]))
        return data

    def commit(self, groups: Array) -> None:
        """groups: bool. Their products since the last time are waited for as one."""
        self._commits[groups] += 1

    def wait(self, groups: Array, count: int) -> None:
        """Waits until at most ``count`` commits of these groups are under way."""
        left = []
        for places, of_groups, at in self._reads:
            ended = groups[of_groups] & (at < self._commits[of_groups] - count)
            self._shared.end_product(places[ended])
            if not ended.all():
                left.append((places[~ended], of_groups[~ended], at[~ended]))
        self._reads = left
        for known in (self._results, self._operands):
            for register, ends in list(known.items()):
                ends[groups & (ends <= self._commits - count)] = 0
                if not ends.any():
                    del known[register]

    def check_use(self, register: str, groups: Array) -> None:
        """groups: bool, those that read or write it."""
        if register in self._results and (self._results[register][groups] != 0).any():
            raise MachineError(f"{register} is the result of a product that was not waited for")

    def check_write(self, register: str, groups: Array) -> None:
        if register in self._operands and (self._operands[register][groups] != 0).any():
            raise MachineError(f"{register} is an operand of a product that was not waited for")
        self._unordered.add(register)

    @property
    def are_under_way(self) -> bool:
        return bool(self._results)
