"""A rank that records when it checks the host's memory, and when it allocates some."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastserve_backend.worker import build_rank, host_store
from fastserve_backend.worker.__main__ import main

NOTES = "NOTES_OF_RANKS"
"""Environment variable with the file of the records, one a line."""
_take = host_store.HostPool
_load = build_rank.load_model


def _note(what: str) -> None:
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.write(f"{what}\n")


def _noting_check(what: str, check: Callable[..., None]) -> Callable[..., None]:
    """Checks whether the host has memory, and records that."""

    def noted(*arguments: Any) -> None:
        _note(f"looks-for-{what}")
        check(*arguments)

    return noted


def _load_and_note(*arguments: Any, **options: Any) -> Any:
    _note("takes-for-weights")
    return _load(*arguments, **options)


def _take_and_note(*arguments: Any) -> Any:
    _note("takes-for-blocks")
    return _take(*arguments)


if __name__ == "__main__":
    build_rank.check_weights_fit = _noting_check("weights", build_rank.check_weights_fit)
    build_rank.check_swap_space = _noting_check("blocks", build_rank.check_swap_space)
    build_rank.load_model = _load_and_note
    host_store.HostPool = _take_and_note  # type: ignore[assignment,misc]
    sys.exit(main())
