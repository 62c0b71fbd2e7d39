"""A file system that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SIZE_BYTES = 1 << 20


@contextmanager
def small_disk(directory: Path, num_bytes: int = SIZE_BYTES) -> Iterator[Path]:
    """Mounts a file system of so many bytes at ``directory``, which is made. Skips the test where
    that is not allowed."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> None:
    """Leaves no byte of the file system free."""
    with (directory / "others").open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
