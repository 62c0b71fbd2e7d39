"""How much memory the host, or the container in it, has for the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

# Of version 2, as a container sees its own; at a host's root there are no limits.
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """Bytes: in all, those that can be taken without swapping, and those of swap that are free."""

    total: int
    available: int
    free_swap: int


def host_memory(cgroup: Path = _CGROUP) -> HostMemory:
    """The host's, or less where the container's limits leave less: past those the kernel kills
    whoever writes to memory, however much of it the host has."""
    memory, free_swap = psutil.virtual_memory(), psutil.swap_memory().free
    total, available = memory.total, memory.available
    if (limit := _limit(cgroup / "memory.max")) is not None:
        total = min(total, limit)
        used = int(_read(cgroup / "memory.current")) - _file_cache(cgroup / "memory.stat")
        available = min(available, max(0, limit - used))
    if (limit := _limit(cgroup / "memory.swap.max")) is not None:
        left = limit - int(_read(cgroup / "memory.swap.current"))
        free_swap = min(free_swap, max(0, left))
    return HostMemory(total, available, free_swap)


def _limit(file: Path) -> int | None:
    try:
        text = _read(file)
    except OSError:
        return None
    return None if text == "max" else int(text)


def _file_cache(stat_file: Path) -> int:
    """Bytes of files in memory: they count as used, and go where memory is short."""
    stat = dict(line.split() for line in _read(stat_file).splitlines())
    return int(stat["active_file"]) + int(stat["inactive_file"])


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
