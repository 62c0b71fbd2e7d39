"""What a phase gets, and where it puts its figures."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.check_device import Device

Value = float | int | str | None


class CheckFailed(Exception):
    """A result is wrong."""


class Recorder:
    """Writes each result of a phase at once, as a line of JSON. So a phase that fails or is killed
    keeps what it has measured."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def row(
        self, table: str, case: Mapping[str, Value], figures: Mapping[str, Value], note: str = ""
    ) -> None:
        """
        Args:
            table: its name; all its rows have the same figures.
            case: tells the row from others of its table.
            figures: a missing one is None, and ``note`` has the reason.
        """
        row = {"table": table, "case": dict(case), "figures": dict(figures), "note": note}
        self._write({"row": row})
        text = ", ".join(
            f"{name} {_short(value)}" for name, value in (*case.items(), *figures.items())
        )
        print(f"  {table}: {text}{note and f' ({note})'}", flush=True)

    def machine(self, description: Mapping[str, Any]) -> None:
        self._write({"machine": dict(description)})

    def error(self, text: str) -> None:
        """Why the phase failed."""
        self._write({"error": text})

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


@dataclass(frozen=True)
class Context:
    device: Device
    recorder: Recorder
    ends_s: float
    """When the phase is killed, by ``time.monotonic``."""
    scratch: Path
    """A directory for files that nobody keeps."""
    dataset: str = "sharegpt"
    """A file of job lengths, as ``fastserve_bench.workload.load_lengths`` takes it."""

    @property
    def tiny(self) -> bool:
        return self.device.is_dry_run

    def left_s(self) -> float:
        return self.ends_s - time.monotonic()


def one_line(error: BaseException) -> str:
    """An error without its traceback, for a note."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
