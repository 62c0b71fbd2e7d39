"""Memory, files and threads of a process."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# Threads of gRPC's pools. It starts another one when all are busy as a timer expires or a task
# comes, and may keep it (timer_manager.cc), so their number depends on the load.
_GRPC_POOLS = frozenset(
    ("grpc_global_tim", "timer_manager", "event_engine", "default-executo", "resolver-execut")
)


@dataclass(frozen=True)
class Holdings:
    pid: int
    memory_bytes: int
    """Anonymous and shared memory in bytes. A page that n processes share counts as 1/n in each.
    Pages of files, such as programs, are left out: how many others share them depends on the
    machine."""
    num_descriptors: int
    num_threads: int
    """Without those of gRPC's pools."""

    @classmethod
    def of(cls, pid: int) -> Holdings:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        kib = sum(map(int, re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup)))
        num_threads = sum(name not in _GRPC_POOLS for name in _thread_names(pid))
        return cls(pid, kib * 1024, psutil.Process(pid).num_fds(), num_threads)


def _thread_names(pid: int) -> list[str]:
    """The first 15 characters of each."""
    names = []
    for directory in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has just ended
            names.append((directory / "comm").read_text(encoding="utf-8").rstrip("\n"))
    return names
