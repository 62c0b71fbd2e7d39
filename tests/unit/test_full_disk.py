"""A full disk costs what would have been stored, and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fastserve_backend.system.atomic_file import write_atomically
from fastserve_backend.worker.disk_store import DiskStore, open_disk
from fastserve_backend.worker.host_store import PlainStore
from fastserve_kernels.cpu import builder
from small_disk import SIZE_BYTES, fill, small_disk

OLD = b"old" * 1000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small") as directory:
        yield directory


def test_a_file_that_does_not_fit_leaves_the_old_one(disk: Path) -> None:
    path = disk / "state"
    write_atomically(path, OLD)
    for _ in range(3):
        with pytest.raises(OSError, match=r"No space left") as failure:
            write_atomically(path, b"new" * SIZE_BYTES)
        assert failure.value.errno == errno.ENOSPC
        assert path.read_bytes() == OLD
        assert list(disk.iterdir()) == [path]  # no draft takes what is left
    fill(disk)
    with pytest.raises(OSError, match=r"No space left"):
        write_atomically(path, b"new" * 10_000)
    assert path.read_bytes() == OLD


def test_sessions_need_no_more_room_once_the_server_runs(disk: Path) -> None:
    host = PlainStore(torch.zeros(4, 3, 100), 8)
    host.blocks.random_(0, 256)
    original = host.blocks.clone()
    store = DiskStore(disk, 12, host)
    fill(disk)
    store.write(range(8), range(4, 12))
    host.blocks.zero_()
    store.read(range(4, 12), range(8))
    assert torch.equal(host.blocks, original)


def test_sessions_for_which_there_is_no_room(disk: Path) -> None:
    host = PlainStore(torch.zeros(4, 3, 100), 8)
    opened = open_disk(str(disk), 0.1, host)
    assert opened.store is None
    assert opened.error is not None
    assert opened.error.startswith("kv_cache.disk_swap_gib: got 0.1; ")
    assert "(No space left on device); lower it, or name another directory as" in opened.error
    assert not list(disk.iterdir())


def test_kernels_for_which_there_is_no_room_are_not_even_compiled(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    monkeypatch.setenv("CXX", "false")  # a compiler that fails
    with pytest.raises(builder.BuildError, match=r"is unusable: .*No space left") as failure:
        builder.build()
    assert "set XDG_CACHE_HOME" in str(failure.value)
    assert not list(builder.cache_dir().iterdir())
