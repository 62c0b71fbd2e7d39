"""Real mappings of host memory for KV blocks. Without a GPU an emulated one registers them."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huge_pages
import pytest
import torch
from emulated_gpu import DEVICE, EmulatedGPU, emulated_gpu
from fastserve_backend.errors import ConfigError
from fastserve_backend.worker import host_pool
from fastserve_backend.worker.host_pool import HostPool, huge_page_bytes
from fastserve_backend.worker.host_store import PlainStore

MIB = 2**20
CPU = torch.device("cpu")
HUGE = 2 * MIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGPU]:
    monkeypatch.setattr(host_pool, "_PIECE_BYTES", 4 * MIB)
    with emulated_gpu() as emulated:
        yield emulated


def mapped(address: int) -> str | None:
    """The flags of the mapping at this address."""
    flags, is_here = None, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            start, _, end = name.partition("-")
            is_here = int(start, 16) <= address < int(end, 16)
        elif is_here and name == "VmFlags:":
            flags = line
    return flags


def is_pinned(address: int) -> bool:
    """Whether memory for a GPU is there. Other memory, which may take its place, is copied on
    fork."""
    return "dc" in (mapped(address) or "").split()


@pytest.mark.parametrize("block_bytes", [4096, 3 * MIB, 5000])
def test_pieces_hold_whole_blocks_and_whole_pages(block_bytes: int, gpu: EmulatedGPU) -> None:
    num_blocks = 18 * MIB // block_bytes
    pool = HostPool(num_blocks, block_bytes, DEVICE)
    first = pool.blocks.data_ptr()
    assert first % HUGE == 0
    assert not pool.blocks.any()
    pieces = sorted(gpu.registered.items())
    assert len(pieces) > 2
    ends = [address + size for address, size in pieces]
    assert [address for address, _ in pieces] == [first, *ends[:-1]]
    assert ends[-1] == first + num_blocks * block_bytes
    for address, _ in pieces:
        assert address % mmap.PAGESIZE == 0
        assert (address - first) % (pool.blocks_per_piece * block_bytes) == 0
    pool.close()
    assert not gpu.registered
    pool.close()


@pytest.mark.skipif(not huge_pages.are_allowed(), reason="this kernel has no huge pages")
def test_pinned_memory_is_private_in_huge_pages_and_not_for_children(
    gpu: EmulatedGPU, caplog: pytest.LogCaptureFixture
) -> None:
    if not huge_pages.are_free(64 * MIB):
        pytest.skip("this machine's free memory has too few huge pages")
    caplog.set_level(logging.INFO)
    pool = HostPool(16, MIB, DEVICE)
    address = pool.blocks.data_ptr()
    flags = mapped(address)
    assert flags is not None
    # hg: huge pages wanted; dc: not copied on fork; sh would be shared.
    assert {"hg", "dc"} <= set(flags.split())
    assert "sh" not in flags.split()
    assert huge_page_bytes(address, 16 * MIB) >= 14 * MIB
    assert "0.0 GiB of host memory for KV blocks pinned in" in caplog.text
    assert "GiB of the host or its container are left" in caplog.text
    assert "small pages" not in caplog.text
    pool.close()


def test_memory_for_a_cpu_is_taken_as_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = HostPool(64, MIB, CPU)
    assert huge_page_bytes(pool.blocks.data_ptr(), 64 * MIB) == 0
    assert "pinned" not in caplog.text
    pool.close()


def test_small_pages_are_reported(
    gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # the kernel refuses it
    HostPool(16, MIB, DEVICE).close()
    assert "small pages, which take longer to pin; before the next start write" in caplog.text


def test_memory_is_unmapped_once_with_its_last_user(gpu: EmulatedGPU) -> None:
    pool = HostPool(4, MIB, DEVICE)
    blocks, address = pool.blocks, pool.blocks.data_ptr()
    del pool
    gc.collect()
    assert not gpu.registered  # before it is unmapped
    assert is_pinned(address)
    del blocks
    gc.collect()
    assert not is_pinned(address)


def test_a_refused_piece_undoes_the_others(
    gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, bool] = {}
    runtime = torch.cuda.cudart()
    register = runtime.cudaHostRegister

    def note_and_register(address: int, *others: int) -> int:
        pinned[address] = is_pinned(address)
        return register(address, *others)

    runtime.cudaHostRegister = note_and_register
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    gpu.most_registered = 9 * MIB
    with pytest.raises(
        ConfigError,
        match=r"kv_cache\.swap_space_gib: 0\.0 GiB of host memory could not be pinned \(emulated "
        r"\(2\)\), when [\d.]+ GiB of the host or its container were left; lower it, or .*ulimit",
    ):
        HostPool(18, MIB, DEVICE)
    assert not gpu.registered
    gc.collect()
    assert all(pinned.values())
    assert len(pinned) > 2
    assert not any(map(is_pinned, pinned))


def test_each_thread_registers_for_the_rank_s_gpu(
    gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[int, torch.device] = {}
    used: list[torch.device | None] = []
    runtime = torch.cuda.cudart()
    register = runtime.cudaHostRegister

    def set_device(device: torch.device) -> None:
        chosen[threading.get_ident()] = device

    def note_and_register(*arguments: int) -> int:
        used.append(chosen.get(threading.get_ident()))
        return register(*arguments)

    runtime.cudaHostRegister = note_and_register
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    HostPool(18, MIB, DEVICE).close()
    assert used == [DEVICE] * 5


def test_no_copy_crosses_from_one_piece_to_the_next(gpu: EmulatedGPU) -> None:
    kv = torch.randn(24, 1, 2, 1, 16, 8192)  # blocks of 1 MiB
    on_device = kv.to(DEVICE)
    store = PlainStore(on_device, 24)
    blocks = list(range(24))
    assert len(gpu.registered) == 6
    gpu.waits.clear()
    with pytest.raises(ValueError, match="crosses the end of registered memory"):
        store.blocks[2:6].copy_(on_device.view(24, -1).view(torch.uint8)[2:6], non_blocking=True)
    store.copy_out(blocks, blocks, 16)
    store.copy_in(blocks[::-1], blocks)
    assert gpu.waits == []
    assert torch.equal(on_device.to("cpu"), kv.flip(0))


@pytest.mark.slow
def test_more_than_the_process_may_map_is_the_users_error() -> None:
    program = """
import resource, torch
from fastserve_backend.errors import ConfigError
from fastserve_backend.worker.host_pool import HostPool
resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
try:
    HostPool(2**17, 2**20, torch.device("cpu"))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=150
    )
    assert done.stdout.startswith(
        "kv_cache.swap_space_gib: 128.0 GiB of host memory cannot be mapped (Cannot allocate "
        "memory); lower it, or raise the limits on the process's memory (ulimit -v: 64.00 GiB"
    ), done.stderr
