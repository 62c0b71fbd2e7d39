"""The rank's KV blocks on the disk: a file of slots that only this process can open."""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastserve_backend.errors import ConfigError
from fastserve_backend.rank_protocol.link import NO_LINK, Link
from fastserve_backend.system.cache_directory import cache_directory
from fastserve_backend.worker.host_store import HostStore
from fastserve_backend.worker.kv_store import neighbour_runs

# The disk's speed is that of so many blocks.
_TEST_BLOCKS = 32


class DiskStore:
    """Slots of one block each, with the same bytes as on the host.

    The file has no name: it is gone when the process ends, however that ends. Its space is taken at
    once, so that a full disk shows at the start. One thread writes and one reads at a time; no slot
    is read while it is written.

    Args:
        directory: on a local disk; made if it is missing.

    Raises:
        OSError: the file cannot be made, or the disk has too little space.
    """

    def __init__(self, directory: Path, num_slots: int, host: HostStore) -> None:
        self._host = host.blocks.numpy().data.cast("B")
        self._block_bytes = host.block_bytes
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Open as long as the process lives.
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_slots * host.block_bytes)
        except OSError:
            self._file.close()
            raise
        self._checksums = np.zeros(num_slots, np.uint32)

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._checksums)

    def write(self, host_blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Write blocks of the host. They are on the disk when it returns.

        Raises:
            OSError: the disk is full or broken.
        """
        descriptor = self._file.fileno()
        for blocks, places in neighbour_runs(host_blocks, slots):
            for block, slot in zip(_numbers(blocks), _numbers(places), strict=True):
                self._checksums[slot] = zlib.crc32(self._memory(slice(block, block + 1)))
            memory, offset = self._memory(blocks), places.start * self._block_bytes
            while memory:
                count = os.pwrite(descriptor, memory, offset)
                memory, offset = memory[count:], offset + count
        # Some disks only tell now what went wrong.
        os.fdatasync(descriptor)
        self._forget_pages()

    def read(self, slots: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Read blocks to the host.

        Raises:
            OSError: the disk is broken, or its blocks are not those that were written.
        """
        descriptor = self._file.fileno()
        for places, blocks in neighbour_runs(slots, host_blocks):
            memory, offset = self._memory(blocks), places.start * self._block_bytes
            while memory:
                count = os.preadv(descriptor, [memory], offset)
                if count == 0:
                    raise OSError(f"the file of KV blocks ends at byte {offset}")
                memory, offset = memory[count:], offset + count
            for block, slot in zip(_numbers(blocks), _numbers(places), strict=True):
                if zlib.crc32(self._memory(slice(block, block + 1))) != self._checksums[slot]:
                    raise OSError(f"slot {slot} on the disk is not what was written to it")
        self._forget_pages()

    def _memory(self, blocks: slice) -> memoryview:
        """The host's bytes of neighbouring blocks."""
        return self._host[blocks.start * self._block_bytes : blocks.stop * self._block_bytes]

    def _forget_pages(self) -> None:
        """Keep nothing of the file in memory: that is what there is too little of."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class OpenedDisk(NamedTuple):
    """What a rank has of the disk."""

    store: DiskStore | None
    link: Link
    """Measured seconds to write one block of the host, and to read it back."""
    error: str | None
    """For the user: why there is no store, although the configuration asks for it."""


def open_disk(directory: str | None, disk_swap_gib: float, host: HostStore) -> OpenedDisk:
    """Take the space, and measure the disk. It overwrites blocks of the host, so call it before
    there are jobs.

    Args:
        directory: default: within the user's cache directory.
        disk_swap_gib: the space of this rank; 0: none.
    """
    num_slots = int(disk_swap_gib * 2**30) // host.block_bytes
    if not len(host) or not num_slots:
        return OpenedDisk(None, NO_LINK, None)
    path = None
    try:
        path = cache_directory("swap") if directory is None else Path(directory)
        store = DiskStore(path, num_slots, host)
        return OpenedDisk(store, _measure(store, len(host)), None)
    except ConfigError as error:
        return OpenedDisk(None, NO_LINK, f"kv_cache.disk_swap_dir: got none, and {error}")
    except OSError as error:
        reason = error.strerror or str(error)
        return OpenedDisk(
            None,
            NO_LINK,
            f"kv_cache.disk_swap_gib: got {disk_swap_gib:g}; {path} does not take so much "
            f"({reason}); lower it, or name another directory as kv_cache.disk_swap_dir",
        )


def _measure(disk: DiskStore, num_host_blocks: int) -> Link:
    blocks = range(min(_TEST_BLOCKS, len(disk), num_host_blocks))
    started = time.perf_counter()
    disk.write(blocks, blocks)
    written = time.perf_counter()
    disk.read(blocks, blocks)
    ended = time.perf_counter()
    return Link((written - started) / len(blocks), (ended - written) / len(blocks))


def _numbers(blocks: slice) -> range:
    return range(blocks.start, blocks.stop)
