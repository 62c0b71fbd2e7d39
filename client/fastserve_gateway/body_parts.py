"""Large bodies are sent in parts, so that they wait for their client where they are counted."""

from __future__ import annotations

from collections.abc import Iterator

# What the connection has taken from the gateway is no more counted. It takes the next part when
# the client has read most of what it has.
_PART_BYTES = 1 << 16


def body_parts(body: bytes) -> Iterator[bytes]:
    """A small body is one part."""
    for start in range(0, len(body), _PART_BYTES):
        yield body[start : start + _PART_BYTES]
