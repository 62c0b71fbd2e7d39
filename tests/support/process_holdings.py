"""Memory, files and threads of a process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Holdings:
    pid: int
    memory_bytes: int
    """Anonymous and shared memory in bytes. A page that n processes share counts as 1/n in each.
    Pages of files, such as programs, are left out: how many others share them depends on the
    machine."""
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        kib = sum(map(int, re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup)))
        process = psutil.Process(pid)
        return cls(pid, kib * 1024, process.num_fds(), process.num_threads())
