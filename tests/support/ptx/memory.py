"""Memory that reports errors that a GPU would make silently."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from ptx.errors import MachineError
from ptx.formats import Array

SHARED_START = 1024
"""Address of each program's first byte of shared memory. It is not 0, which could hide a bug."""
POISON = 0xFF
"""Bytes that were not written yet: NaN."""
SEVERAL = -2
"""Takes the place of a warp: more than one warp."""


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
        self._bytes = [
            np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8)
            for start, size in known
        ]

    def read(self, addresses: Array, width: int) -> Array:
        """uint8 [n, width] at int64 [n]."""
        data = np.empty((len(addresses), width), np.uint8)
        for index, chosen, places in self._places(addresses, width):
            data[chosen] = self._bytes[index][places]
        return data

    def write(self, addresses: Array, data: Array) -> None:
        """data: uint8 [n, width]."""
        for index, chosen, places in self._places(addresses, data.shape[1]):
            self._bytes[index][places] = data[chosen]
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

    def _places(self, addresses: Array, width: int) -> Iterable[tuple[int, Array, Array]]:
        found = self.check(addresses, width)
        for index in np.unique(found):
            chosen = found == index
            yield (
                int(index),
                chosen,
                _spread(addresses[chosen] - self._starts[index], width),
            )


class SharedMemory:
    """The shared memories of some programs of a grid.

    Between two barriers of a program, only the warp that writes a byte may use it, and only the
    warp that reads a byte may write it: else the order is chance. Nothing may write what a product
    under way reads.
    """

    def __init__(self, num_programs: int, num_bytes: int) -> None:
        self._size = num_bytes
        self._pitch = -(-num_bytes // 16) * 16
        size = num_programs * self._pitch
        self._bytes = np.full(size, POISON, np.uint8)
        self._barriers = np.zeros(num_programs, np.int32)
        # For each byte: the barriers before its last write or read, and the warp.
        self._written_at, self._writer = np.full(size, -1, np.int32), np.zeros(size, np.int32)
        self._read_at, self._reader = np.full(size, -1, np.int32), np.zeros(size, np.int32)
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
        of_bytes, at, warps = self._of_bytes(places, width, warps)
        _check(of_bytes, at, warps, self._written_at, self._writer, "read before a barrier")
        _note(of_bytes, at, warps, self._read_at, self._reader)
        return self._bytes[_spread(places, width)]

    def write(self, places: Array, data: Array, warps: Array) -> None:
        """data: uint8 [n, width]."""
        of_bytes, values = self.claim(places, data.shape[1], warps), data.ravel()
        self._bytes[of_bytes] = values
        if (self._bytes[of_bytes] != values).any():
            raise MachineError("two threads write different values to one place")

    def claim(self, places: Array, width: int, warps: Array) -> Array:
        """Reserves bytes that warps are about to write; returns the index of each byte."""
        of_bytes, at, warps = self._of_bytes(places, width, warps)
        _check(of_bytes, at, warps, self._written_at, self._writer, "written by two warps")
        _check(of_bytes, at, warps, self._read_at, self._reader, "written while it is read")
        if self._products[of_bytes // 16].any():
            raise MachineError("a product that was not waited for reads what is written")
        _note(of_bytes, at, warps, self._written_at, self._writer)
        self._bytes[of_bytes] = POISON
        return of_bytes

    def read_by_product(self, places: Array) -> Array:
        """uint8 [n, 16], which a product reads until `end_product`. Places are multiples of 16."""
        data = self.read(places, 16, np.full(len(places), SEVERAL))
        np.add.at(self._products, places // 16, 1)
        return data

    def end_product(self, places: Array) -> None:
        """places: those of `read_by_product`, or some of them."""
        np.subtract.at(self._products, places // 16, 1)

    def _of_bytes(self, places: Array, width: int, warps: Array) -> tuple[Array, Array, Array]:
        """Of each of them: its place, the barriers of its program, and the warp."""
        of_bytes = _spread(places, width).ravel()
        return of_bytes, self._barriers[of_bytes // self._pitch], np.repeat(warps, width)


def _check(
    of_bytes: Array, at: Array, warps: Array, used_at: Array, user: Array, what: str
) -> None:
    conflicts = (used_at[of_bytes] == at) & (user[of_bytes] != warps)
    if conflicts.any():
        raise MachineError(f"{int(conflicts.sum())} bytes of shared memory are {what}")


def _note(of_bytes: Array, at: Array, warps: Array, used_at: Array, user: Array) -> None:
    is_shared = (used_at[of_bytes] == at) & (user[of_bytes] != warps)
    used_at[of_bytes] = at
    user[of_bytes] = np.where(is_shared, SEVERAL, warps)
    # Where two of these warps use the same byte, one of them was kept above.
    user[of_bytes[user[of_bytes] != warps]] = SEVERAL


def _spread(places: Array, width: int) -> Array:
    return places[:, None] + np.arange(width)


def _check_alignment(addresses: Array, width: int) -> None:
    if (addresses % width).any():
        raise MachineError(f"an address is not a multiple of {width}")
