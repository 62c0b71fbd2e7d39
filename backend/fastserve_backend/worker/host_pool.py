"""The memory of a rank's KV blocks on the host: one mapping, pinned piece by piece for a GPU."""

from __future__ import annotations

import logging
import math
import mmap
import resource
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastserve_backend.errors import ConfigError
from fastserve_backend.system.cores import num_cores
from fastserve_backend.worker.host_limits import host_memory

_GIB = 2**30
_HUGE_PAGE = 2 * 2**20
# A thread touches and registers so much at a time. The driver has a lock that may let one piece be
# registered at a time. Then the other threads still touch theirs meanwhile.
_PIECE_BYTES = 512 * 2**20
# More threads than this compete for memory bandwidth and for locks of the kernel.
_MOST_THREADS = 8
_log = logging.getLogger(__name__)


class HostPool:
    """Zeroed memory of ``num_blocks`` blocks, pinned if ``device`` is a GPU.

    The mapping is private and asks for huge pages. Shared memory, the default of Python's ``mmap``,
    has small pages only, and so 512 times as many to create and to register. torch's pinned
    allocator would round up to powers of two.

    For a GPU all pages are created here, by several threads. Each of them registers the piece of
    memory that it has touched. A piece ends at the end of a block, and so must every copy: CUDA
    does not say whether a copy may cross from one registration to the next. For a CPU the kernel
    creates pages as blocks are used.

    A forked process does not get the mapping: otherwise a write here after the fork would move the
    page away from the address that the GPU knows.

    Raises:
        ConfigError: the memory cannot be mapped or pinned. Nothing stays mapped or pinned then.
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        started = time.perf_counter()
        self.blocks_per_piece = _blocks_per_piece(block_bytes)
        """No copy may cross a multiple of this number of blocks."""
        num_bytes = num_blocks * block_bytes
        memory = torch.empty(0, dtype=torch.uint8) if num_bytes == 0 else _mapped(num_bytes)
        self.blocks = memory.view(num_blocks, block_bytes)
        """uint8 ``[num_blocks, block_bytes]``. The memory is unmapped when nobody refers to it."""
        registered = _Registered(device)
        if device.type == "cuda" and num_bytes > 0:
            _pin(torch.split(self.blocks, self.blocks_per_piece), registered)
            _log_pinned(memory, time.perf_counter() - started)
        self._unpin = weakref.finalize(self, registered.release)
        # Other threads may still copy when the process ends, which unpins, too.
        self._unpin.atexit = False

    def close(self) -> None:
        """Unpin the memory. No copy may be under way or follow. Calls after the first do nothing,
        and a pool that is never closed does this when it is collected."""
        self._unpin()


class _Registered:
    """The pieces of one pool that CUDA has registered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: list[int] = []

    def register(self, piece: Tensor) -> None:
        """Create the piece's pages and register them. Any thread may call this.

        Raises:
            CudaError: CUDA refuses.
        """
        torch.cuda.set_device(self._device)  # a new thread starts with GPU 0
        # NumPy lets other threads run meanwhile. Registering would create the pages, too, but
        # perhaps under the driver's lock.
        piece.view(-1).numpy()[:: mmap.PAGESIZE] = 0
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
        self._addresses.append(piece.data_ptr())

    def release(self) -> None:
        """Unregister all. Calls after the first do nothing."""
        while self._addresses:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(self._addresses.pop()))


def _blocks_per_piece(block_bytes: int) -> int:
    """As many blocks as end where a page ends, so that no page is in two pieces."""
    whole_pages = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, block_bytes)
    return max(1, _PIECE_BYTES // block_bytes // whole_pages) * whole_pages


def _mapped(num_bytes: int) -> Tensor:
    """uint8 ``[num_bytes]``, from a multiple of 2 MiB on."""
    try:
        pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"kv_cache.swap_space_gib: {num_bytes / _GIB:.1f} GiB of host memory cannot be mapped "
            f"({error.strerror}); lower it, or raise the limits on the process's memory "
            f"(ulimit -v: {_limit(resource.RLIMIT_AS)}, ulimit -d: {_limit(resource.RLIMIT_DATA)}, "
            "vm.overcommit_memory)"
        ) from None
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # from a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    offset = -memory.data_ptr() % _HUGE_PAGE
    return memory[offset : offset + num_bytes]


def _pin(pieces: Sequence[Tensor], registered: _Registered) -> None:
    """
    Raises:
        ConfigError: CUDA refuses a piece. Then none is registered.
    """
    with ThreadPoolExecutor(min(_MOST_THREADS, num_cores(), len(pieces))) as threads:
        futures = [threads.submit(registered.register, piece) for piece in pieces]
        reason = next((error for one in futures if (error := one.exception())), None)
        threads.shutdown(cancel_futures=True)
    if reason is None:
        return
    wanted = sum(piece.numel() for piece in pieces)
    available = host_memory().available
    registered.release()
    if not isinstance(reason, torch.cuda.CudaError):
        raise reason
    raise ConfigError(
        f"kv_cache.swap_space_gib: {wanted / _GIB:.1f} GiB of host memory could not be pinned "
        f"({reason}), when {available / _GIB:.1f} GiB of the host or its container were left; "
        "lower it, or raise the limits of the machine or its container "
        f"(ulimit -l: {_limit(resource.RLIMIT_MEMLOCK)})"
    )


def _log_pinned(memory: Tensor, seconds: float) -> None:
    huge = huge_page_bytes(memory.data_ptr(), memory.numel())
    _log.info(
        "%.1f GiB of host memory for KV blocks pinned in %.1f s, %.1f GiB in huge pages; "
        "%.1f GiB of the host or its container are left",
        memory.numel() / _GIB,
        seconds,
        huge / _GIB,
        host_memory().available / _GIB,
    )
    if huge < memory.numel() // 2 and memory.numel() >= 2 * _HUGE_PAGE:
        _log.warning(
            "most host memory for KV blocks is in small pages, which take longer to pin; before "
            "the next start write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        )


def huge_page_bytes(address: int, num_bytes: int) -> int:
    """How many bytes of this process's mappings in a range of addresses are in huge pages. Every
    mapping that the range touches counts as a whole."""
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # the first line of a mapping: its addresses
            start, _, end = name.partition("-")
            is_inside = int(start, 16) < address + num_bytes and address < int(end, 16)
        elif is_inside and name == "AnonHugePages:":
            found += int(rest.split()[0]) * 1024
    return found


def _limit(kind: int) -> str:
    limit = resource.getrlimit(kind)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / _GIB:.2f} GiB"
