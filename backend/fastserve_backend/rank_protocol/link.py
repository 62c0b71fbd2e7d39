"""How fast KV blocks move between a device and its host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds to copy one KV block, with all layers of the rank, between a device and its host."""

    block_out_s: float
    """From the device to the host; 0 without host blocks to measure it."""
    block_in_s: float
    """From the host to the device, likewise."""
