"""How tenants share a limited resource, so that none takes all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Shares:
    """Counts how much each holder has of a limited resource, in bytes or pieces.

    A holder has at most half of what the others leave. So as much as it has stays free: one holder
    alone gets half of the resource, two get a third each, and there is always room for another one.
    (This is a dynamic threshold, as that of the server's queue: docs/fair_shares.md.)

    Args:
        size: of the resource.
        are_divided: False: there is one holder only, which may have all.
    """

    def __init__(self, size: int, *, are_divided: bool) -> None:
        self._size = size
        self._are_divided = are_divided
        self._held: Counter[Hashable] = Counter()
        self._total = 0

    def held(self, holder: Hashable) -> int:
        return self._held[holder]

    def most(self, holder: Hashable) -> int:
        """As much as the holder may have now."""
        left = self._size - (self._total - self._held[holder])
        return left // 2 if self._are_divided else left

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
