"""Whether Linux has huge pages to give. A machine whose free memory is in small pieces has few."""

from __future__ import annotations

import mmap
from pathlib import Path

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_BYTES = 2 * 2**20


def are_allowed() -> bool:
    return _ENABLED.exists() and "[never]" not in _ENABLED.read_text()


def huge_page_bytes(pid: int | str) -> int:
    """Bytes of a process's memory in huge pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("AnonHugePages:")]
    return int(line.split()[1]) * 1024


def are_free(num_bytes: int) -> bool:
    """Whether a process that asks for so much memory in huge pages gets nearly all of it so now."""
    before = huge_page_bytes("self")
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1
        # The first and the last page may be partly outside.
        return huge_page_bytes("self") - before >= num_bytes - 2 * _HUGE_BYTES
