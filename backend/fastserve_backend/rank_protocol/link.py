"""How fast KV blocks move between a device and its host, or a host and its disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds to copy one KV block, with all layers of the rank."""

    block_out_s: float
    """From the device to the host, or from there to the disk; 0 without blocks to measure it."""
    block_in_s: float
    """In the other direction, likewise."""


NO_LINK = Link(0.0, 0.0)
