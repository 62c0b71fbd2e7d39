"""A rank that notes when it looks at the memory of the host, and when it takes some."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from fastserve_backend.worker import host_store, weight_memory, worker
from fastserve_backend.worker.__main__ import main

NOTES = "NOTES_OF_RANKS"
"""Variable: the file, a line a note."""
_take = host_store._host_memory
_load = worker.load_model


def _note(what: str) -> None:
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.write(f"{what}\n")


def _look_and_note() -> Any:
    _note("looks")
    return psutil.virtual_memory()


def _load_and_note(*arguments: Any, **options: Any) -> Any:
    _note("loads")
    return _load(*arguments, **options)


def _take_and_note(*arguments: Any) -> Any:
    _note("takes")
    return _take(*arguments)


if __name__ == "__main__":
    for module in (host_store, weight_memory):
        module.psutil = SimpleNamespace(  # type: ignore[attr-defined]
            virtual_memory=_look_and_note, swap_memory=psutil.swap_memory
        )
    worker.load_model = _load_and_note
    host_store._host_memory = _take_and_note
    sys.exit(main())
