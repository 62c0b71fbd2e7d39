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


def _looking_for(what: str) -> Any:
    """psutil, as far as a module uses it that looks whether there is memory for this."""

    def virtual_memory() -> Any:
        _note(f"looks-for-{what}")
        return psutil.virtual_memory()

    return SimpleNamespace(virtual_memory=virtual_memory, swap_memory=psutil.swap_memory)


def _load_and_note(*arguments: Any, **options: Any) -> Any:
    _note("takes-for-weights")
    return _load(*arguments, **options)


def _take_and_note(*arguments: Any) -> Any:
    _note("takes-for-blocks")
    return _take(*arguments)


if __name__ == "__main__":
    weight_memory.psutil = _looking_for("weights")
    host_store.psutil = _looking_for("blocks")
    worker.load_model = _load_and_note
    host_store._host_memory = _take_and_note
    sys.exit(main())
