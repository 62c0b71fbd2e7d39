"""Which servers have seen which beginnings of prompts, and how long ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fastserve_gateway.routing.prefixes import Prefix

MAX_PAIRS: Final = 1 << 17
"""Pairs of a prefix and a server, about 50 MiB. They cover 16 million tokens of text."""


class PrefixMemory:
    """Remembers the latest prefixes of each server. The longest unused ones are forgotten.

    A server keeps the KV of ended requests until new KV needs the room. So a prefix counts as lost
    when the server has computed more tokens since then than it has room for.

    Args:
        num_servers: their indices are below it.
    """

    def __init__(self, num_servers: int, max_pairs: int = MAX_PAIRS) -> None:
        self._max_pairs = max_pairs
        self._num_pairs = 0
        # Key of a prefix → server → tokens that the server had computed when it saw it last.
        self._seen: OrderedDict[int, dict[int, float]] = OrderedDict()
        self._computed = [0.0] * num_servers
        self._room = [float("inf")] * num_servers

    @property
    def num_pairs(self) -> int:
        return self._num_pairs

    def note(self, prefixes: Sequence[Prefix], server: int) -> None:
        """A server computes a prompt with these beginnings, or has just done so."""
        seen, computed = self._seen, self._computed[server]
        for key, _ in reversed(prefixes):  # a shorter one is never forgotten before a longer one
            servers = seen.get(key)
            if servers is None:
                seen[key] = {server: computed}
                self._num_pairs += 1
                continue
            self._num_pairs += server not in servers
            servers[server] = computed
            seen.move_to_end(key)
        while self._num_pairs > self._max_pairs:
            _, servers = seen.popitem(last=False)
            self._num_pairs -= len(servers)

    def find(self, prefixes: Sequence[Prefix]) -> dict[int, int]:
        """The servers that have a beginning of a prompt, each with its longest one's length."""
        seen, all_computed, room = self._seen, self._computed, self._room
        found: dict[int, int] = {}
        num_known = 0
        for key, end in reversed(prefixes):
            servers = seen.get(key)
            # Who has seen a prefix has seen the shorter ones too, so an equal number is the same.
            if servers is None or len(servers) == num_known:
                continue
            num_known = len(servers)
            for server, computed in servers.items():
                if server not in found and all_computed[server] - computed < room[server]:
                    found[server] = end
        return found

    def on_computed(self, server: int, num_tokens: int, room: int) -> None:
        """A server has computed more tokens.

        Args:
            room: tokens that its KV memory holds.
        """
        self._computed[server] += num_tokens
        self._room[server] = room

    def forget(self, server: int) -> None:
        """A server has lost all KV."""
        for key in [key for key, servers in self._seen.items() if server in servers]:
            servers = self._seen[key]
            del servers[server]
            self._num_pairs -= 1
            if not servers:
                del self._seen[key]
