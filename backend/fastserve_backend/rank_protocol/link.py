"""How fast KV blocks cross between a device and its host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Between a device and its host: seconds to copy one KV block, all layers of the rank."""

    block_out_s: float
    """From the device to the host; 0 where no host memory was there to measure it."""
    block_in_s: float
