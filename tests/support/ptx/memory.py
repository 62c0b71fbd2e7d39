"""Memory that reports errors that a GPU would make silently."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ptx.errors import MachineError
from ptx.formats import Array

SHARED_START = 1024
"""Address of each program's first byte of shared memory. It is not 0, which could hide a bug."""
POISON = 0xFF
"""Bytes that were not written yet: NaN."""
_WARP_BITS = 16
SEVERAL = np.uint32((1 << _WARP_BITS) - 1)
"""Takes the place of a warp: more than one warp."""
NEVER = np.uint32(0xFFFF << _WARP_BITS)
"""Takes the place of a use."""
_MOST_WIDTH = 16
"""Bytes that one instruction of a thread reads or writes."""


class GlobalMemory:
    """The host's memory, restricted to some tensors."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """ranges: (address, bytes)."""
        known = sorted({(start, size) for start, size in ranges if size})
        self.ranges = known
        self.written: set[tuple[int, int]] = set()
        """Those of the ranges that were written to."""
        self._starts = np.array([start for start, _ in known], dtype=np.int64)
        self._ends = np.array([start + size for start, size in known], dtype=np.int64)
        # Each from a multiple of the largest width, so that what a thread reads or writes is a row.
        self._firsts = self._starts // _MOST_WIDTH * _MOST_WIDTH
        self._bytes = [
            np.frombuffer((ctypes.c_uint8 * (end - first)).from_address(first), dtype=np.uint8)
            for first, end in zip(self._firsts.tolist(), self._ends.tolist(), strict=True)
        ]

    def read(self, addresses: Array, width: int) -> Array:
        """uint8 [n, width] at int64 [n]."""
        data = np.empty((len(addresses), width), np.uint8)
        for index, chosen, rows in self._rows(addresses, width):
            data[chosen] = _as_rows(self._bytes[index], width)[rows]
        return data

    def write(self, addresses: Array, data: Array) -> None:
        """data: uint8 [n, width]."""
        width = data.shape[1]
        for index, chosen, rows in self._rows(addresses, width):
            _as_rows(self._bytes[index], width)[rows] = data[chosen]
            self.written.add(self.ranges[index])

    def check(self, addresses: Array, width: int) -> Array:
        """Indices of the tensors.

        Raises:
            MachineError: an address is not a multiple of the width, or outside of all tensors.
        """
        _check_alignment(addresses, width)
        found: Array = np.searchsorted(self._starts, addresses, "right") - 1
        outside = (found < 0) | (addresses + width > self._ends[found])
        if outside.any():
            first = int(addresses[outside][0])
            raise MachineError(f"{int(outside.sum())} threads outside all tensors, at {first:#x}")
        return found

    def _rows(self, addresses: Array, width: int) -> Iterable[tuple[int, Array | slice, Array]]:
        """Of each tensor: its index, which of the addresses are in it, and their rows."""
        found = self.check(addresses, width)
        if not len(found):
            return
        if (found == found[0]).all():
            yield int(found[0]), slice(None), (addresses - self._firsts[found[0]]) // width
            return
        for index in np.unique(found):
            chosen = found == index
            yield int(index), chosen, (addresses[chosen] - self._firsts[index]) // width


class SharedMemory:
    """The shared memories of some programs of a grid.

    Between two barriers of a program, only the warp that writes a byte may use it, and only the
    warp that reads a byte may write it: else the order is chance. Nothing may write what a product
    under way reads.
    """

    def __init__(self, num_programs: int, num_bytes: int, unit: int = 1) -> None:
        """unit: bytes that are always used together, at most ``_MOST_WIDTH``."""
        self._size = num_bytes
        self._pitch = -(-num_bytes // 16) * 16
        size = num_programs * self._pitch
        self._bytes = np.full(size, POISON, np.uint8)
        self._barriers = np.zeros(num_programs, np.uint32)
        self._written, self._read = _LastUses(size, unit), _LastUses(size, unit)
        # For each 16 bytes: the products that read them and were not waited for.
        self._products = np.zeros(size // 16, np.int32)

    def barrier(self, programs: Array) -> None:
        self._barriers[programs] += 1

    def places(self, addresses: Array, programs: Array, width: int) -> Array:
        """The index in this object at which each thread's bytes begin.

        Raises:
            MachineError: an address is not a multiple of the width, or outside.
        """
        _check_alignment(addresses, width)
        offsets = addresses - SHARED_START
        if ((offsets < 0) | (offsets + width > self._size)).any():
            raise MachineError(f"outside the {self._size} bytes of shared memory")
        places: Array = programs * self._pitch + offsets
        return places

    def read(self, places: Array, width: int, warps: Array) -> Array:
        """uint8 [n, width]."""
        uses = self._uses(places, width, warps)
        self._written.check(uses, "read before a barrier")
        self._read.note(uses)
        return _as_rows(self._bytes, width)[uses.rows]

    def write(self, places: Array, data: Array, warps: Array) -> None:
        """data: uint8 [n, width]."""
        width = data.shape[1]
        rows, values = self._reserve(places, width, warps), _as_rows(self._bytes, width)
        values[rows] = data
        if (values[rows] != data).any():
            raise MachineError("two threads write different values to one place")

    def claim(self, places: Array, width: int, warps: Array) -> None:
        """Reserves bytes that warps are about to write."""
        _as_rows(self._bytes, width)[self._reserve(places, width, warps)] = POISON

    def _reserve(self, places: Array, width: int, warps: Array) -> Array:
        """The rows of ``width`` bytes."""
        uses = self._uses(places, width, warps)
        self._written.check(uses, "written by two warps")
        self._read.check(uses, "written while it is read")
        if self._products[places // 16].any():
            raise MachineError("a product that was not waited for reads what is written")
        self._written.note(uses)
        return uses.rows

    def read_by_product(self, places: Array) -> Array:
        """uint8 [n, 16], which a product reads until `end_product`. Places are multiples of 16."""
        data = self.read(places, 16, np.full(len(places), SEVERAL))
        np.add.at(self._products, places // 16, 1)
        return data

    def end_product(self, places: Array) -> None:
        """places: those of `read_by_product`, or some of them."""
        np.subtract.at(self._products, places // 16, 1)

    def _uses(self, places: Array, width: int, warps: Array) -> _Uses:
        barriers = self._barriers[places // self._pitch]
        return _Uses(places // width, width, barriers << _WARP_BITS, warps.astype(np.uint32))


@dataclass(frozen=True)
class _Uses:
    """Of shared memory, by one instruction of some threads."""

    rows: Array
    """[n] of ``width`` bytes each."""
    width: int
    at: Array
    """uint32 [n]: the barriers of the thread's program so far, above the bits of a warp."""
    warps: Array
    """uint32 [n]"""


class _LastUses:
    """For each unit of shared memory: its last use of one kind, as a number of the barriers before
    it and the warp."""

    def __init__(self, size: int, unit: int) -> None:
        self._unit = unit
        self._numbers = np.full(size // unit, NEVER, np.uint32)

    def check(self, uses: _Uses, what: str) -> None:
        conflicts = self._by_others(uses)
        if conflicts.any():
            count = int(conflicts.sum()) * self._unit
            raise MachineError(f"{count} bytes of shared memory are {what}")

    def note(self, uses: _Uses) -> None:
        is_shared = self._by_others(uses)
        numbers, own = self._of(uses), (uses.at | uses.warps)[:, None]
        numbers[uses.rows] = own
        # Where two of these warps use the same unit, one of them was kept.
        is_shared |= numbers[uses.rows] != own
        if is_shared.any():
            users, places = np.nonzero(is_shared)
            numbers[uses.rows[users], places] = uses.at[users] | SEVERAL

    def _by_others(self, uses: _Uses) -> Array:
        """bool [n, units]: whether another warp has used the unit since the last barrier."""
        numbers = self._of(uses)[uses.rows]
        numbers ^= (uses.at | uses.warps)[:, None]
        numbers -= np.uint32(1)  # which makes the same use the largest number
        result: Array = numbers < SEVERAL
        return result

    def _of(self, uses: _Uses) -> Array:
        """The numbers by rows of these uses."""
        return _as_rows(self._numbers, uses.width // self._unit)


def _as_rows(values: Array, width: int) -> Array:
    """A view of [n, width], without the values at the end that fill no row."""
    return values[: len(values) // width * width].reshape(-1, width)


def _check_alignment(addresses: Array, width: int) -> None:
    if (addresses % width).any():
        raise MachineError(f"an address is not a multiple of {width}")
