"""Copies from global to shared memory that run while their threads go on (``cp.async``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptx.formats import Array
from ptx.memory import GlobalMemory, SharedMemory

NOTHING = -1
"""Takes the place of a source's address where zeros are written."""


@dataclass
class _Copy:
    threads: Array
    """Indices."""
    groups: Array
    """Number of groups that the thread had committed before this one."""
    sources: Array
    """Addresses, or ``NOTHING``."""
    places: Array
    width: int

    def part(self, chosen: Array) -> _Copy:
        return _Copy(
            self.threads[chosen],
            self.groups[chosen],
            self.sources[chosen],
            self.places[chosen],
            self.width,
        )


class AsyncCopies:
    """Copies arrive only when a thread waits for them. Until then their targets hold poison."""

    def __init__(self, memory: GlobalMemory, shared: SharedMemory, warp_of: Array) -> None:
        self._memory, self._shared, self._warp_of = memory, shared, warp_of
        self._committed = np.zeros(len(warp_of), np.int64)  # groups, of each thread
        self._under_way: list[_Copy] = []

    def start(self, threads: Array, sources: Array, places: Array, width: int) -> None:
        """sources: addresses, or ``NOTHING``. places: indices in shared memory."""
        self._memory.check(sources[sources != NOTHING], width)
        self._shared.claim(places, width, self._warp_of[threads])
        copy = _Copy(threads, self._committed[threads], sources, places, width)
        self._under_way.append(copy)

    def commit(self, mask: Array) -> None:
        self._committed[mask] += 1

    def wait(self, mask: Array, most: int) -> None:
        """Waits until all but the last ``most`` groups of each thread have arrived."""
        left = []
        for copy in self._under_way:
            threads = copy.threads
            ends = mask[threads] & (copy.groups < self._committed[threads] - most)
            self._arrive(copy.part(ends))
            if not ends.all():
                left.append(copy.part(~ends))
        self._under_way = left

    def _arrive(self, copy: _Copy) -> None:
        data = np.zeros((len(copy.threads), copy.width), np.uint8)
        is_real = copy.sources != NOTHING
        data[is_real] = self._memory.read(copy.sources[is_real], copy.width)
        self._shared.write(copy.places, data, self._warp_of[copy.threads])
