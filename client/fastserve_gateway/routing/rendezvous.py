"""Rendezvous hashing: an order of the servers for each key, equal in all gateways.

Each pair of a key and a server has a score, and the highest one wins. If a server leaves, only its
own keys move. Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
1998.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

_MASK = (1 << 64) - 1
# Odd, and with bits all over: the product's high bits, which decide, depend on all bits of both.
_MULTIPLIER = 0x9E3779B97F4A7C15


class Rendezvous:
    """The order of ``servers``, which are names."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._salts = [stable_hash(name) for name in servers]

    def first(self, key: int, among: Sequence[int]) -> int:
        """The server of ``among``, which is not empty, that comes first for a key.

        Args:
            key: 64 bits.
        """
        if len(among) == 1:
            return among[0]
        salts = self._salts
        scores = [(key ^ salts[server]) * _MULTIPLIER & _MASK for server in among]
        return among[scores.index(max(scores))]


def stable_hash(text: str) -> int:
    """64 bits, equal in all processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
