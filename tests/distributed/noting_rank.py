"""A rank that notes when it looks at the memory of the host, and when it takes some for blocks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from fastserve_backend.worker import host_store
from fastserve_backend.worker.__main__ import main

NOTES = "NOTES_OF_RANKS"
"""Variable: the file, a line a note."""
_take = host_store._host_memory


def _note(what: str) -> None:
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.write(f"{what}\n")


def _look_and_note() -> Any:
    _note("looks")
    return psutil.virtual_memory()


def _take_and_note(*arguments: Any) -> Any:
    _note("takes")
    return _take(*arguments)


if __name__ == "__main__":
    host_store.psutil = SimpleNamespace(virtual_memory=_look_and_note)  # type: ignore[assignment]
    host_store._host_memory = _take_and_note
    sys.exit(main())
