"""The files of a command that measures or simulates."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fastserve_client.errors import WorkloadError
from fastserve_client.report.style import check_path


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go besides the terminal."""

    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Before hours of measuring. Raises WorkloadError: a file that cannot be written."""
        for name, path in (("output", self.json), ("plot", self.plot)):
            if path is not None:
                _check_writable(name, path)
        if self.plot is not None:
            check_path(self.plot)


def _check_writable(name: str, path: Path) -> None:
    if not path.parent.is_dir():
        reason = "its directory does not exist"
    elif path.is_dir():
        reason = "it is a directory; name a file"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "it cannot be written"
    else:
        return
    raise WorkloadError(f"{name}: got {str(path)!r}; {reason}")


def write_json(path: Path, text: str) -> None:
    """Raises WorkloadError: the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"output: cannot write {path}: {error.strerror}") from None
