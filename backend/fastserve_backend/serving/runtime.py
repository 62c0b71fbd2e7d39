"""The private directory of one running server: what launcher and stub tell each other, and cleanup.

The launcher passes its path in the environment of the server; stub and ranks inherit it. So it also
marks every process that belongs to this server, orphans included.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll

from fastserve_backend.temporary_directory import short_temporary_directory

RUNTIME_VARIABLE = "FASTSERVE_RUNTIME_DIR"
LAUNCHER_VARIABLE = "FASTSERVE_LAUNCHER_PID"

# A process that was sent SIGKILL is gone as soon as the kernel has freed its memory.
_KILL_WAIT_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")
# The engine's socket is in a directory in the one that is made there.
_MOST_PARENT_BYTES = 45
# Triton starts stubs by a shell command in which their paths are not quoted.
_NOT_IN_A_COMMAND = re.compile(r"[^\w./+-]", re.ASCII)


class RuntimeDirectory:
    """``path`` holds the backend directory, the model repository and the reports of the stub."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stub_file = path / "stub.pid"
        self._failure_file = path / "failure.txt"
        self._given_up_file = path / "given-up"
        self._drain_file = path / "drain"
        self._drained_file = path / "drained"
        self._end_file = path / "end"
        self._lock: int | None = None

    @classmethod
    def create(cls) -> RuntimeDirectory:
        """Makes an empty one that only this user can read."""
        parent = short_temporary_directory(_MOST_PARENT_BYTES)
        if _NOT_IN_A_COMMAND.search(parent):
            parent = "/tmp"
        runtime = cls(Path(tempfile.mkdtemp(prefix="fastserve-", dir=parent)))
        # Systems that clear /tmp of what is some days old leave directories that are locked
        # (tmpfiles.d(5)).
        runtime._lock = os.open(runtime.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(runtime._lock, fcntl.LOCK_SH)
        return runtime

    @classmethod
    def from_environment(cls) -> RuntimeDirectory | None:
        """That of the launcher that started this process; None in a server started otherwise."""
        path = os.environ.get(RUNTIME_VARIABLE)
        return cls(Path(path)) if path else None

    @property
    def backends(self) -> Path:
        return self.path / "backends"

    @property
    def repository(self) -> Path:
        return self.path / "repository"

    @property
    def shared_memory_prefix(self) -> str:
        """Of what the server's python backend shares with its stub. The server refuses to let
        clients register regions that are called so in the beginning."""
        return f"triton_python_backend_shm_region_{self.path.name}-"

    def environment(self) -> dict[str, str]:
        """What the server inherits; temporary files of its processes go with the directory."""
        return {
            RUNTIME_VARIABLE: str(self.path),
            LAUNCHER_VARIABLE: str(os.getpid()),
            "TMPDIR": str(self.path),
        }

    def report_stub(self) -> None:
        """Called by the stub before it loads the model, and so before there is any request."""
        for region in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            region.chmod(0o600)  # whoever can read it, reads prompts; the server leaves it at 0644
        _write_at_once(self._stub_file, str(os.getpid()))

    def report_failure(self, reason: str, *, gave_up: bool = False) -> None:
        """Called by the stub when the model cannot load, or its engine broke.

        Args:
            gave_up: the engine has restarted its ranks as often as it may; so restarting all of the
                server would be once too often.
        """
        if gave_up:
            self._given_up_file.touch()
        _write_at_once(self._failure_file, reason)

    def request_drain(self) -> None:
        """Called by the launcher: the stub shall refuse new requests and finish those it has."""
        self._drain_file.touch()

    def drain_requested(self) -> bool:
        return self._drain_file.exists()

    def report_drained(self) -> None:
        """Called by the stub once every request has its last response."""
        self._drained_file.touch()

    def drained(self) -> bool:
        return self._drained_file.exists()

    def request_end(self) -> None:
        """Called by the launcher: the stub shall end what is unfinished with an error."""
        self._end_file.touch()

    def end_requested(self) -> bool:
        return self._end_file.exists()

    def stub_pid(self) -> int | None:
        text = _read(self._stub_file)
        return int(text) if text else None

    def failure(self) -> str | None:
        return _read(self._failure_file)

    def gave_up(self) -> bool:
        """Of a ``failure``, whether it is one to give up after."""
        return self._given_up_file.exists()

    def clear_reports(self) -> None:
        for file in (
            self._stub_file,
            self._failure_file,
            self._given_up_file,
            self._drain_file,
            self._drained_file,
            self._end_file,
        ):
            file.unlink(missing_ok=True)

    def processes(self) -> list[int]:
        """Ids of all processes of this server (server, stub, ranks), also orphaned ones."""
        marker = f"{RUNTIME_VARIABLE}={self.path}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            except OSError:  # ended meanwhile, or another user's
                continue
            if marker in variables:
                found.append(int(entry.name))
        return found

    def kill_processes(self) -> None:
        """Ends what is left of this server and waits until it is gone."""
        handles = []
        for pid in self.processes():
            with suppress(ProcessLookupError):  # it may end at any time
                handles.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(handles[-1], signal.SIGKILL)
        for handle in handles:
            wait_readable(_KILL_WAIT_S, handle)
            os.close(handle)

    def remove_shared_memory(self) -> None:
        """Removes what the python backend left in /dev/shm; only when the server is gone."""
        for path in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def wait_readable(timeout_s: float, *descriptors: int) -> set[int]:
    """Those of ``descriptors`` that are readable, as soon as one is, or none after ``timeout_s``.

    A pidfd is readable once its process has ended.
    """
    poller = poll()
    for descriptor in descriptors:
        poller.register(descriptor, POLLIN)
    return {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}


def _write_at_once(path: Path, text: str) -> None:
    # A reader must never see half of it.
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
