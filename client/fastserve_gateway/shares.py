"""How tenants share a limited resource, so that none takes all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

MOST_TIMES = 4.0
"""A holder of a large weight may have so many times what it leaves, and no more: others need room
for a request, whatever its weight is."""


class Shares:
    """Counts how much each holder has of a limited resource, in bytes or pieces.

    A holder has at most half of what the others leave. So as much as it has stays free: one holder
    alone gets half of the resource, two get a third each, and there is always room for another one.
    (This is a dynamic threshold, as that of the server's queue: docs/fair_shares.md.)

    With weights, a holder has at most so many times what stays free as its weight is larger than
    the smallest one, up to ``MOST_TIMES``. So holders that all want more have it in proportion to
    their weights.

    Args:
        size: of the resource.
        are_divided: False: there is one holder only, which may have all.
        weights: of holders, all above 0. Others have the smallest; None: all are equal.
    """

    def __init__(
        self, size: int, *, are_divided: bool, weights: Mapping[Any, float] | None = None
    ) -> None:
        self._size = size
        self._are_divided = are_divided
        least = min(weights.values(), default=1.0) if weights else 1.0
        self._times = {
            holder: min(MOST_TIMES, weight / least) for holder, weight in (weights or {}).items()
        }
        self._held: Counter[Hashable] = Counter()
        self._total = 0

    def held(self, holder: Hashable) -> int:
        return self._held[holder]

    def most(self, holder: Hashable) -> int:
        """As much as the holder may have now."""
        left = self._size - (self._total - self._held[holder])
        if not self._are_divided:
            return left
        times = self._times.get(holder, 1.0)
        return int(left * times / (1 + times))

    def allows(self, holder: Hashable, amount: int) -> bool:
        """Whether the holder may have so much more."""
        return self._held[holder] + amount <= self.most(holder)

    def add(self, holder: Hashable, amount: int) -> None:
        self._held[holder] += amount
        self._total += amount

    def remove(self, holder: Hashable, amount: int) -> None:
        self._total -= amount
        self._held[holder] -= amount
        if not self._held[holder]:
            del self._held[holder]
