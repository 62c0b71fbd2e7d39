"""Copies of KV blocks between tiers, which go on while steps run."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


class TransferKind(enum.Enum):
    SWAP_OUT = "swap_out"
    """Device to host. The device blocks are free when it ends."""
    WRITE_BACK = "write_back"
    """Device to host, full blocks ahead of a swap-out. The job may run meanwhile."""
    SWAP_IN = "swap_in"
    """Host to device. The job may run when it ends."""

    @property
    def is_out(self) -> bool:
        return self is not TransferKind.SWAP_IN


@dataclass(frozen=True, slots=True)
class Transfer:
    """One job's copies of blocks: ``device_blocks[i]`` to or from ``host_blocks[i]``.

    The last block of each group comes behind all others.
    """

    id: int
    job_number: int
    kind: TransferKind
    device_blocks: array[int]
    host_blocks: array[int]
    num_last: int
    """How many blocks are the last of their group. The others are full."""
    num_tokens: int
    """How many of the job's first tokens both tiers have when it ends, as far as layers with a
    window see them."""
    keys: Sequence[bytes] = ()
    """Of the job's first blocks of a group, as far as the host's may be found by others."""


@dataclass(frozen=True, slots=True)
class DiskTransfer:
    """Copies of blocks between host and disk: ``host_blocks[i]`` to or from ``slots[i]``. None if
    the other side has them all."""

    id: int
    job_number: int
    is_write: bool
    host_blocks: array[int]
    slots: array[int]
    num_tokens: int
    """Of the job's first tokens both sides have the KV when it ends."""
    keys: Sequence[bytes]
    """Of the job's first blocks of a group, as far as others may find them."""
    started_s: float

    @property
    def owner(self) -> int:
        """See ``disk_transfer_owner``."""
        return disk_transfer_owner(self.id)


def disk_transfer_owner(transfer_id: int) -> int:
    """The number under which a disk transfer has its slots until it ends, and a read its host
    blocks too. No job has this number."""
    return -1 - transfer_id
