"""Which stores of a launch each of its programs may rely on.

A kernel whose programs meet by atomic additions reads what another program has stored. Only then is
this looked at: it takes time and memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ptx.errors import MachineError
from ptx.formats import Array

_WORD = 4
"""Bytes that are looked at as one."""


class GlobalOrder:
    """The order of stores and loads of global memory, by barriers and atomic additions.

    A program's barriers divide its time. An atomic addition that releases publishes what the
    program did before its last barrier, and what it knew of others. One that acquires makes the
    program know what was published at that address, from its next barrier on. Whoever uses what
    another program has stored, or stores to what it has loaded, must know of that. Within a
    program, a barrier must be between two warps.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]], num_programs: int) -> None:
        """ranges: (address, bytes), which may overlap. num_programs: of the whole grid."""
        self._starts, ends = _united(ranges)
        sizes = -(-(ends - self._starts) // _WORD)
        self._firsts = np.cumsum(sizes) - sizes
        total = int(sizes.sum())
        # For each word: the last program to store and to load it, from 1, its time, and the warp.
        # Of loads by several programs, the last is kept.
        self._stored, self._loaded = (np.zeros((3, total), np.int32) for _ in range(2))
        self._time = np.zeros(num_programs, np.int32)
        # For each program and other program: up to which time it knows what that one did.
        self._known = np.zeros((num_programs, num_programs), np.int32)
        self._learned = np.zeros((num_programs, num_programs), np.int32)  # since its last barrier
        self._published: dict[int, Array] = {}  # by address

    def barrier(self, programs: Array) -> None:
        self._time[programs] += 1
        self._known[programs] = np.maximum(self._known[programs], self._learned[programs])

    def load(self, addresses: Array, width: int, programs: Array, warps: Array) -> None:
        words, programs, warps = self._words(addresses, width, programs, warps)
        self._check(self._stored, words, programs, warps, "loaded")
        self._note(self._loaded, words, programs, warps, self._time[programs])

    def store(self, addresses: Array, width: int, programs: Array, warps: Array) -> None:
        words, programs, warps = self._words(addresses, width, programs, warps)
        self._check(self._stored, words, programs, warps, "stored")
        self._check(self._loaded, words, programs, warps, "stored")
        self._note(self._stored, words, programs, warps, self._time[programs])

    def add(self, address: int, program: int, *, releases: bool, acquires: bool) -> None:
        """An atomic addition by one thread."""
        place = np.array([address])
        words, programs, warps = self._words(place, _WORD, np.array([program]), np.zeros(1, int))
        # It publishes itself, too.
        self._note(self._stored, words, programs, warps, self._time[programs] - 1)
        published = self._published.setdefault(address, np.zeros_like(self._time))
        if acquires:
            np.maximum(self._learned[program], published, out=self._learned[program])
        if releases:
            np.maximum(published, self._known[program], out=published)
            published[program] = self._time[program]

    def _words(
        self, addresses: Array, width: int, programs: Array, warps: Array
    ) -> tuple[Array, Array, Array]:
        found = np.searchsorted(self._starts, addresses, "right") - 1
        first = self._firsts[found] + (addresses - self._starts[found]) // _WORD
        count = -(-width // _WORD)
        words: Array = (first[:, None] + np.arange(count)).ravel()
        return words, np.repeat(programs, count), np.repeat(warps, count)

    def _check(self, used: Array, words: Array, programs: Array, warps: Array, what: str) -> None:
        other, time, warp = used[:, words]
        other -= 1
        is_used = other >= 0
        is_own = other == programs
        unordered = is_used & ~is_own & (self._known[programs, other] <= time)
        if unordered.any():
            raise MachineError(
                f"{int(unordered.sum())} words of another program are {what} in any order"
            )
        unordered = is_own & (warp != warps) & (time == self._time[programs])
        if unordered.any():
            raise MachineError(f"{int(unordered.sum())} words of another warp are {what} too early")

    @staticmethod
    def _note(used: Array, words: Array, programs: Array, warps: Array, times: Array) -> None:
        used[:, words] = programs + 1, times, warps


def _united(ranges: Iterable[tuple[int, int]]) -> tuple[Array, Array]:
    """Starts and ends of the ranges, those that overlap or touch as one."""
    united: list[list[int]] = []
    for start, size in sorted(ranges):
        if united and start <= united[-1][1]:
            united[-1][1] = max(united[-1][1], start + size)
        else:
            united.append([start // _WORD * _WORD, start + size])
    bounds = np.array(united or [[0, 0]], dtype=np.int64)
    return bounds[:, 0], bounds[:, 1]
