"""What is left of the host's memory, and of its container's: a pool of pinned memory has to fit.

python3 benchmarks/gpu/host_memory.py
"""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMINFO_LINES = ("MemTotal", "MemAvailable", "AnonHugePages", "ShmemHugePages", "HugePages_Free")


def available_gib(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> float:
    """GiB that can be taken without swapping: of the host, or of the container if it has less."""
    lines = _lines(meminfo)
    available = int(lines.get("MemAvailable", lines["MemFree"]).split()[0]) * 1024
    limit, current = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and current.isdigit():
        # The kernel gives back the cache of files before it refuses memory.
        cached = re.search(r"^inactive_file (\d+)", _read(cgroup / "memory.stat"), re.MULTILINE)
        used = int(current) - (int(cached[1]) if cached else 0)
        available = min(available, max(0, int(limit) - used))
    return available / 2**30


def describe() -> str:
    """Lines about memory, limits and huge pages."""
    lines = _lines(_MEMINFO)
    texts = [f"memory left: {available_gib():.1f} GiB"]
    texts += [f"{name}: {lines[name]}" for name in _MEMINFO_LINES if name in lines]
    texts += [
        f"{path.name}: {_read(path) or 'no such file'}"
        for path in (_CGROUP / "memory.max", _CGROUP / "memory.current")
    ]
    return "\n".join([*texts, f"transparent huge pages: {_read(_HUGE_PAGES) or 'none'}"])


def _lines(meminfo: Path) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    return {name: value.strip() for name, value in pairs}


def _read(path: Path) -> str:
    """A file of the kernel's; empty if there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    print(describe())
