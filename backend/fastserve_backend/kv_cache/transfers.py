"""Copies of KV blocks between tiers, which go on while steps run."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
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


class UnfinishedTransfers:
    """At most one for each job."""

    def __init__(self) -> None:
        self._by_job: dict[int, Transfer] = {}
        # Each decision asks for these numbers, so they are not summed up.
        self._num_of_kind = dict.fromkeys(TransferKind, 0)
        self._blocks_of_kind = dict.fromkeys(TransferKind, 0)

    def __len__(self) -> int:
        return len(self._by_job)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._by_job.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that they copy."""
        return sum(self._blocks_of_kind.values())

    def of(self, job_number: int) -> Transfer | None:
        """The job's transfer."""
        return self._by_job.get(job_number)

    def num_of(self, kind: TransferKind) -> int:
        """Transfers of this kind."""
        return self._num_of_kind[kind]

    def blocks_of(self, kind: TransferKind) -> int:
        """Blocks that transfers of this kind copy."""
        return self._blocks_of_kind[kind]

    def add(self, transfer: Transfer) -> None:
        self._by_job[transfer.job_number] = transfer
        self._num_of_kind[transfer.kind] += 1
        self._blocks_of_kind[transfer.kind] += len(transfer.device_blocks)

    def pop(self, job_number: int) -> Transfer:
        """Remove the job's transfer, which has ended."""
        transfer = self._by_job.pop(job_number)
        self._num_of_kind[transfer.kind] -= 1
        self._blocks_of_kind[transfer.kind] -= len(transfer.device_blocks)
        return transfer

    def check_integrity(self) -> None:
        """Raise AssertionError unless the numbers agree with the transfers."""
        for kind in TransferKind:
            blocks = [len(one.device_blocks) for one in self if one.kind is kind]
            assert (self._num_of_kind[kind], self._blocks_of_kind[kind]) == (
                len(blocks),
                sum(blocks),
            ), f"transfers: {kind}"


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
