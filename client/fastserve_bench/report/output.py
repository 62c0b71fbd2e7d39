"""The files of a command that measures or simulates."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fastserve_client.errors import WorkloadError

from fastserve_bench.report.style import check_path


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go besides the terminal."""

    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Raises WorkloadError if a file cannot be written, before hours of measuring."""
        for name, path in (("output", self.json), ("plot", self.plot)):
            if path is not None:
                check_writable(name, path)
        if self.plot is not None:
            check_path(self.plot)


def check_writable(name: str, path: Path) -> None:
    """Raises WorkloadError if no file can be written there. ``name`` is the option's."""
    try:
        reason = _obstacle(path)
    except OSError as error:  # for example, a directory that may not be searched
        reason = f"it cannot be written ({error.strerror})"
    if reason is not None:
        raise WorkloadError(f"{name}: got {str(path)!r}; {reason}")


def _obstacle(path: Path) -> str | None:
    if not path.parent.is_dir():
        return "its directory does not exist"
    if path.is_dir():
        return "it is a directory; name a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "it cannot be written"
    return None


def write_json(path: Path, text: str) -> None:
    """Writes in place, so a link stays a link, and a device a device.

    Raises WorkloadError if the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"output: cannot write {path}: {error.strerror}") from None
