"""Names of a prompt's beginnings, so that prompts which begin alike are recognised."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b, sha256
from typing import Final, NamedTuple

CHUNK_BYTES: Final = 512
"""About 128 tokens of English. Smaller chunks find a little more of a shared beginning, and fill
the memory of prefixes sooner."""


class Prefix(NamedTuple):
    """A beginning of a prompt."""

    key: int
    """Equal in all gateways for equal beginnings."""
    end: int
    """Its length in bytes."""


def prompt_prefixes(parts: Iterable[bytes], salt: str = "") -> tuple[Prefix, ...]:
    """The beginnings of a prompt, the shortest first: one after each ``CHUNK_BYTES`` of a part, and
    one after each part.

    Args:
        parts: the prompt in pieces, such as messages. A longer prompt shares the beginnings of a
            shorter one if its first parts are the same.
        salt: prompts with other salts share no KV, and so no keys. Valid Unicode.
    """
    prefixes = []
    key = sha256(salt.encode()).digest() if salt else b""
    state, end = blake2b(digest_size=8, key=key), 0
    for part in parts:
        for begin in range(0, len(part), CHUNK_BYTES):
            chunk = part[begin : begin + CHUNK_BYTES]
            state.update(chunk)
            end += len(chunk)
            prefixes.append(Prefix(int.from_bytes(state.digest()), end))
    return tuple(prefixes)
