"""The processes that this process starts while a test runs.

A list of a process's children shows them at one moment: a child that is about to run its program
has no command line yet, and children of other tests start and end meanwhile. Here each process is
noted when it starts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

RANK = "fastserve_backend.worker"
"""An argument of each rank."""


class StartedProcesses:
    """Processes in the order of their start. Ranks of ``forked_ranks`` are none of them."""

    def __init__(self) -> None:
        self._started: list[tuple[list[str], psutil.Process]] = []

    def note(self, process: subprocess.Popen[Any]) -> None:
        """Called before anybody waits for the process, which may have ended."""
        arguments = process.args if isinstance(process.args, (list, tuple)) else [process.args]
        self._started.append((list(map(str, arguments)), psutil.Process(process.pid)))

    def of(self, argument: str) -> list[psutil.Process]:
        """Those with this argument, whether they have ended or not."""
        return [process for arguments, process in list(self._started) if argument in arguments]

    def left(self, argument: str) -> list[psutil.Process]:
        """Those of them that have not ended, or for which nobody has waited."""
        return [process for process in self.of(argument) if process.is_running()]


@contextmanager
def noting_processes() -> Iterator[StartedProcesses]:
    """Notes what this process starts in the block, with any of its threads."""
    started = StartedProcesses()

    class NotedPopen(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.note(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", NotedPopen)
        yield started


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has waited for it: its parent may be gone, too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
