"""What a stub tells the launcher, in files of the runtime directory."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path


class Mark:
    """A file whose existence is a message."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self) -> None:
        self._path.touch()

    def is_set(self) -> bool:
        return self._path.exists()

    def set_at_ns(self) -> int | None:
        """When it was set last, in nanoseconds of the file system's clock; None: never."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None


class StubReports:
    """The reports of one stub, in a directory that has its process id as name. A model that is
    being reloaded has two stubs."""

    def __init__(self, directory: Path) -> None:
        self.pid = int(directory.name)
        self._directory = directory
        self._model_file = directory / "model.txt"
        self._failure_file = directory / "failure.txt"
        self.loaded = Mark(directory / "loaded")
        """Set once the model is loaded: from now on the end of the stub is a failure."""
        self.alive = Mark(directory / "alive")
        """Set several times a second, while the stub and its engine work."""
        self.gave_up = Mark(directory / "gave-up")
        """Set before a failure: the engine has used up its restarts of ranks, so the server must
        not be restarted either."""
        self.drained = Mark(directory / "drained")
        """Set once every request has its last response, if the launcher wants that."""

    def start(self, model: str) -> None:
        """Called before the stub loads the model of this name."""
        self._directory.mkdir()
        _write_at_once(self._model_file, model)

    def show_life(self) -> None:
        with suppress(FileNotFoundError):  # the directory has just been removed
            self.alive.set()

    def report_failure(self, reason: str) -> None:
        """The model cannot load, or its engine broke."""
        _write_at_once(self._failure_file, reason)

    def withdraw(self) -> None:
        """Called when the model is unloaded: the end of the stub is no failure."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def model(self) -> str:
        """Name of the model; empty once the reports are withdrawn."""
        return _read(self._model_file) or ""

    def failure(self) -> str | None:
        return _read(self._failure_file)


def _write_at_once(path: Path, text: str) -> None:
    # A reader must never see half of it.
    draft = path.with_suffix(".draft")
    # The text may have file names that the stub's Python could not decode.
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
