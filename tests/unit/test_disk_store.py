"""The file in which a rank keeps KV blocks: what comes back, who sees it, and what goes wrong."""

from __future__ import annotations

import os
import queue
import re
import stat
from array import array
from pathlib import Path

import pytest
import torch
from fastserve_backend.rank_protocol.messages import CopyResult, DiskCopy
from fastserve_backend.worker.disk_engine import DiskEngine
from fastserve_backend.worker.disk_store import DiskStore, open_disk
from fastserve_backend.worker.host_store import HostStore, PlainStore

NUM_SLOTS, NUM_HOST = 12, 8
DEADLINE_S = 30.0


@pytest.fixture
def host() -> HostStore:
    store = PlainStore(torch.zeros(4, 3, 100), NUM_HOST)
    store.blocks.random_(0, 256)
    return store


@pytest.fixture
def disk(host: HostStore, tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, NUM_SLOTS, host)


def test_blocks_come_back_to_other_places(host: HostStore, disk: DiskStore) -> None:
    original = host.blocks.clone()
    disk.write([0, 1, 2, 5, 4], [7, 8, 11, 1, 0])
    host.blocks.zero_()
    disk.read([8, 7, 11, 0, 1], [0, 6, 3, 4, 5])
    assert torch.equal(host.blocks[[6, 0, 3, 4, 5]], original[[0, 1, 2, 4, 5]])
    assert not host.blocks[[1, 2, 7]].any()


def test_only_this_process_sees_the_file(disk: DiskStore, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    descriptor = disk._file.fileno()
    file = os.fstat(descriptor)
    assert (stat.S_IMODE(file.st_mode), file.st_nlink) == (0o600, 0)
    assert not os.get_inheritable(descriptor)
    assert file.st_blocks * 512 >= NUM_SLOTS * 1200  # the space is taken


def test_a_changed_byte_is_noticed(host: HostStore, disk: DiskStore) -> None:
    disk.write([1, 2], [3, 4])
    byte = os.pread(disk._file.fileno(), 1, 5 * host.block_bytes - 1)
    os.pwrite(disk._file.fileno(), bytes([byte[0] ^ 1]), 5 * host.block_bytes - 1)
    disk.read([3], [0])
    with pytest.raises(OSError, match="slot 4 on the disk is not what was written"):
        disk.read([3, 4], [0, 1])


def test_a_file_that_was_cut_is_noticed(disk: DiskStore) -> None:
    disk.write([0, 1], [0, 1])
    os.ftruncate(disk._file.fileno(), 100)
    with pytest.raises(OSError, match="ends at byte 100"):
        disk.read([0, 1], [0, 1])


@pytest.mark.parametrize(
    ("directory", "gib", "message"),
    [
        ("/dev/null/swap", 0.001, r"/dev/null/swap does not take so much \(Not a directory\)"),
        (None, 2**20, r"got 1.04858e\+06; .* does not take so much"),
    ],
)
def test_why_there_is_no_disk(
    host: HostStore, tmp_path: Path, directory: str | None, gib: float, message: str
) -> None:
    opened = open_disk(directory or str(tmp_path), gib, host)
    assert opened.store is None
    assert opened.error is not None
    assert re.search(message, opened.error)


def test_the_space_is_divided_into_slots_and_measured(host: HostStore, tmp_path: Path) -> None:
    opened = open_disk(str(tmp_path / "new" / "directory"), 30.5 * host.block_bytes / 2**30, host)
    assert opened.store is not None
    assert len(opened.store) == 30
    assert min(opened.link.block_out_s, opened.link.block_in_s) > 0
    assert open_disk(None, 0.0, host).store is None


def test_the_threads_answer_each_copy(host: HostStore, disk: DiskStore) -> None:
    own, original = os.nice(0), host.blocks.clone()
    written: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
    read: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
    engine = DiskEngine(disk, send_written=written.put, send_read=read.put)
    slots, blocks = array("i", [2, 9]).tobytes(), array("i", [0, 1]).tobytes()
    engine.start_copy(DiskCopy(1, True, blocks, slots))
    result = written.get(timeout=DEADLINE_S)
    assert (result.transfer_id, result.error) == (1, None)
    engine.start_copy(DiskCopy(2, False, array("i", [6, 7]).tobytes(), slots))
    result = read.get(timeout=DEADLINE_S)
    assert (result.transfer_id, result.error) == (2, None)
    assert torch.equal(host.blocks[6:], original[:2])
    os.ftruncate(disk._file.fileno(), 0)
    engine.start_copy(DiskCopy(3, False, blocks, slots))
    error = read.get(timeout=DEADLINE_S).error
    assert error is not None
    assert error.startswith("OSError: the file of KV blocks ends")
    assert os.nice(0) == own  # only the thread that writes is nice
