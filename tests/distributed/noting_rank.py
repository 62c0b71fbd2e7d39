"""A rank that notes when it looks at the memory of the host, and when it takes some."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastserve_backend.worker import host_store, weight_memory, worker
from fastserve_backend.worker.__main__ import main
from fastserve_backend.worker.host_memory import HostMemory, host_memory

NOTES = "NOTES_OF_RANKS"
"""Variable: the file, a line a note."""
_take = host_store._host_memory
_load = worker.load_model


def _note(what: str) -> None:
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.write(f"{what}\n")


def _looking_for(what: str) -> Callable[[], HostMemory]:
    """`host_memory` for a module that looks whether there is memory for this."""

    def noted() -> HostMemory:
        _note(f"looks-for-{what}")
        return host_memory()

    return noted


def _load_and_note(*arguments: Any, **options: Any) -> Any:
    _note("takes-for-weights")
    return _load(*arguments, **options)


def _take_and_note(*arguments: Any) -> Any:
    _note("takes-for-blocks")
    return _take(*arguments)


if __name__ == "__main__":
    weight_memory.host_memory = _looking_for("weights")
    host_store.host_memory = _looking_for("blocks")
    worker.load_model = _load_and_note
    host_store._host_memory = _take_and_note
    sys.exit(main())
