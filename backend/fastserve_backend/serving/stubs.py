"""The launcher's view of the stubs: which models are loaded, whose process has ended or hangs."""

from __future__ import annotations

import os
from contextlib import suppress

from fastserve_backend.serving.liveness import ProcessLife
from fastserve_backend.serving.reports import StubReports
from fastserve_backend.serving.runtime import RuntimeDirectory, wait_readable


class LoadedStubs:
    """A pidfd for the stub of each loaded model. Models may be loaded and unloaded meanwhile."""

    def __init__(self, runtime: RuntimeDirectory) -> None:
        self._runtime = runtime
        self._handles: dict[int, int] = {}  # process id → pidfd
        self._lives: dict[int, ProcessLife] = {}  # of the same processes
        self.reports: list[StubReports] = []
        """Those of the loaded models, as `update` found them."""

    def update(self) -> None:
        """Look for stubs that have come, and forget those that have withdrawn their reports, or
        have ended before their model was loaded: Triton says why."""
        self.reports = []
        for one in self._runtime.stub_reports():
            if one.loaded.is_set():
                self.reports.append(one)
            elif not os.path.exists(f"/proc/{one.pid}"):
                one.withdraw()
        pids = {one.pid for one in self.reports}
        for pid in self._handles.keys() - pids:
            os.close(self._handles.pop(pid))
            del self._lives[pid]
        for pid in pids - self._handles.keys():
            self._handles[pid] = _open_process(pid)
            self._lives[pid] = ProcessLife(pid)

    @property
    def handles(self) -> list[int]:
        """Descriptors, one of which is readable when a stub has ended."""
        return list(self._handles.values())

    @property
    def models(self) -> set[str]:
        """Names of the loaded models."""
        return {one.model() for one in self.reports} - {""}

    def ended_model(self) -> str | None:
        """The model of a stub that has ended without being unloaded; None: there is none."""
        ended = wait_readable(0.0, *self.handles)
        for reports in self.reports:
            # It withdraws its reports before it ends.
            if self._handles[reports.pid] in ended and reports.loaded.is_set():
                return reports.model()
        return None

    def find_hung(self) -> str | None:
        """Says which model's process does nothing any more; None: all work."""
        for reports in self.reports:
            fault = self._lives[reports.pid].find_fault(reports.alive.set_at_ns())
            if fault is not None and reports.loaded.is_set():  # else it is unloaded
                return f"the process of {reports.model()} {fault}"
        return None

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def _open_process(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return os.open(os.devnull, os.O_RDONLY)  # it has ended: always readable
