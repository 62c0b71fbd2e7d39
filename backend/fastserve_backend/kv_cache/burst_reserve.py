"""How many device blocks to keep free for jobs that may arrive (FastServe §4.2)."""

from __future__ import annotations

from collections import deque

# Blocks are freed by swapping within about this time, so a burst is what arrives in less.
_BURST_S = 0.25
# Bursts of so long ago still count.
_MEMORY_S = 60.0
# Of the device, at most: more would keep out jobs that are here for those that may come.
_MAX_SHARE = 0.25


class BurstReserve:
    """The blocks of the largest burst of arrivals lately: the more frequent bursts are, and the
    longer their prompts, the larger. Every operation costs O(1) amortised."""

    def __init__(self, num_device_blocks: int) -> None:
        self._most = int(num_device_blocks * _MAX_SHARE)
        self._burst: deque[tuple[float, int]] = deque()  # (time, blocks) of the latest _BURST_S
        self._burst_blocks = 0
        # (time, blocks of the burst that ended then), descending: the first is the largest.
        self._largest: deque[tuple[float, int]] = deque()

    def add(self, num_blocks: int, now: float) -> None:
        """A job with a prompt of ``num_blocks`` blocks arrived."""
        self._burst.append((now, num_blocks))
        self._burst_blocks += num_blocks
        while self._burst[0][0] < now - _BURST_S:
            self._burst_blocks -= self._burst.popleft()[1]
        while self._largest and self._largest[-1][1] <= self._burst_blocks:
            self._largest.pop()
        self._largest.append((now, self._burst_blocks))

    def num_blocks(self, now: float) -> int:
        while self._largest and self._largest[0][0] < now - _MEMORY_S:
            self._largest.popleft()
        return min(self._most, self._largest[0][1]) if self._largest else 0
