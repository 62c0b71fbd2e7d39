"""How fast each tenant's tokens come beside those of others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache


class TenantSpeed:
    """Bounds a batch so that each tenant has its share of the speed that it would have alone: with
    a share of 1/2, the time between its tokens is at most twice as long.

    The time of a batch grows with its jobs, on CPUs most, so many jobs of one tenant slow the only
    job of another one down. If each job adds as much to it as the others, the bound costs the
    machine less than half of its tokens where two tenants have equal weights.
    """

    def __init__(self, max_seqs: int, decodes_s: Callable[[int], float]) -> None:
        """
        Args:
            decodes_s: the time of a batch that decodes so many jobs, in seconds; it never
                decreases.
        """
        self._max_seqs = max_seqs
        self._decodes_s = cache(decodes_s)

    def needs_bound(self, largest_share: float) -> bool:
        """Whether some batch slows a tenant down too much, if none has a larger share."""
        return self._decodes_s(1) < largest_share * self._decodes_s(self._max_seqs)

    def most_seats(self, tenants: Iterable[tuple[int, float]]) -> int:
        """
        Args:
            tenants: the number of jobs, at least 1, and the share, above 0, of each tenant.
        """
        most = self._max_seqs
        longest_s = min(self._decodes_s(min(num, most)) / share for num, share in tenants)
        return bisect_right(range(1, most + 1), longest_s, key=self._decodes_s)
