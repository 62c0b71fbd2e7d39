"""Memory that notices what a GPU would do wrong without a word."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from ptx.errors import MachineError
from ptx.formats import Array

SHARED_START = 1024
"""Address of the first byte of shared memory, of every program. (Of 0 a bug might make use.)"""
POISON = 0xFF
"""Bytes of what was not written yet: NaN."""
SEVERAL = -2
"""In the place of a warp: more than one."""


class GlobalMemory:
    """The host's memory, of some tensors only."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """ranges: (address, bytes)."""
        known = sorted({(start, size) for start, size in ranges if size})
        self._starts = np.array([start for start, _ in known], dtype=np.int64)
        self._ends = np.array([start + size for start, size in known], dtype=np.int64)
        self._bytes = [
            np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8)
            for start, size in known
        ]

    def read(self, addresses: Array, width: int) -> Array:
        """uint8 [n, width] at int64 [n]."""
        data = np.empty((len(addresses), width), np.uint8)
        for memory, chosen, places in self._places(addresses, width):
            data[chosen] = memory[places]
        return data

    def write(self, addresses: Array, data: Array) -> None:
        """data: uint8 [n, width]."""
        for memory, chosen, places in self._places(addresses, data.shape[1]):
            memory[places] = data[chosen]

    def check(self, addresses: Array, width: int) -> Array:
        """Indices of the tensors.

        Raises:
            MachineError: an address is not a multiple of the width, or outside of all tensors.
        """
        _check_alignment(addresses, width)
        found: Array = np.searchsorted(self._starts, addresses, "right") - 1
        outside = (found < 0) | (addresses + width > self._ends[found])
        if outside.any():
            behind = int((addresses - self._ends[found])[outside][0])
            raise MachineError(
                f"{int(outside.sum())} threads outside all tensors, the first {behind} bytes "
                "behind the end of one"
            )
        return found

    def _places(self, addresses: Array, width: int) -> Iterable[tuple[Array, Array, Array]]:
        found = self.check(addresses, width)
        for index in np.unique(found):
            chosen = found == index
            yield (
                self._bytes[index],
                chosen,
                _spread(addresses[chosen] - self._starts[index], width),
            )


class SharedMemory:
    """Of some programs of a grid, each with its own.

    Between two barriers of a program a word that a warp writes may be used by that warp alone, and
    one that a warp reads may be written by that warp alone: else it is chance who comes first.
    """

    def __init__(self, num_programs: int, num_bytes: int) -> None:
        self._size = num_bytes
        self._pitch = -(-num_bytes // 16) * 16
        self._bytes = np.full(num_programs * self._pitch, POISON, np.uint8)
        words = num_programs * self._pitch // 4
        self._barriers = np.zeros(num_programs, np.int64)
        # Of each word: after how many barriers, and by which warp.
        self._written_at, self._writer = np.full(words, -1, np.int64), np.zeros(words, np.int64)
        self._read_at, self._reader = np.full(words, -1, np.int64), np.zeros(words, np.int64)

    def barrier(self, programs: Array) -> None:
        self._barriers[programs] += 1

    def places(self, addresses: Array, programs: Array, width: int) -> Array:
        """Where, in what this object holds, each thread's bytes begin.

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
        words, at, warps = self._words(places, width, warps)
        self._check(words, at, warps, self._written_at, self._writer, "read before a barrier")
        is_shared = (self._read_at[words] == at) & (self._reader[words] != warps)
        self._read_at[words] = at
        self._reader[words] = np.where(is_shared, SEVERAL, warps)
        # Where two of these threads read the same word, one of them was kept above.
        self._reader[words[self._reader[words] != warps]] = SEVERAL
        return self._bytes[_spread(places, width)]

    def write(self, places: Array, data: Array, warps: Array) -> None:
        """data: uint8 [n, width]."""
        self.claim(places, data.shape[1], warps)
        self._bytes[_spread(places, data.shape[1])] = data

    def claim(self, places: Array, width: int, warps: Array) -> None:
        """Says that warps write here, from now on until they do."""
        words, at, warps = self._words(places, width, warps)
        if width >= 4:  # parts of a word may be of several
            self._check(words, at, warps, self._written_at, self._writer, "written by two warps")
        self._check(words, at, warps, self._read_at, self._reader, "written while it is read")
        self._written_at[words], self._writer[words] = at, warps
        self._bytes[_spread(places, width)] = POISON

    def _words(self, places: Array, width: int, warps: Array) -> tuple[Array, Array, Array]:
        """Of each of them: its index, the barriers of its program, and the warp."""
        count = max(width // 4, 1)
        words = _spread(places // 4, count).ravel()
        return words, self._barriers[words * 4 // self._pitch], np.repeat(warps, count)

    def _check(
        self, words: Array, at: Array, warps: Array, used_at: Array, user: Array, what: str
    ) -> None:
        conflicts = (used_at[words] == at) & (user[words] != warps)
        if conflicts.any():
            raise MachineError(f"{int(conflicts.sum())} words of shared memory are {what}")


def _spread(places: Array, width: int) -> Array:
    return places[:, None] + np.arange(width)


def _check_alignment(addresses: Array, width: int) -> None:
    if (addresses % width).any():
        raise MachineError(f"an address is not a multiple of {width}")
