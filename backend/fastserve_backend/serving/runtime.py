"""The private directory of one running server, through which launcher and stubs talk.

The launcher passes its path in the environment of the server; stubs and ranks inherit it. So the
variable also marks every process of this server, orphans included, for the cleanup.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll

from fastserve_client.protocol import MODEL_NAME

from fastserve_backend.serving.reports import Mark, StubReports
from fastserve_backend.system.temporary_directory import short_temporary_directory

RUNTIME_VARIABLE = "FASTSERVE_RUNTIME_DIR"
LAUNCHER_VARIABLE = "FASTSERVE_LAUNCHER_PID"

# A killed process is gone as soon as the kernel has freed its memory.
_KILL_WAIT_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")
# The engine's socket is two directories below the parent, and its path must be short.
_MOST_PARENT_BYTES = 45
# Triton starts stubs by a shell command, and does not quote their paths.
_NOT_IN_A_COMMAND = re.compile(r"[^\w./+-]", re.ASCII)
# Larger blocks go back to the system when tritonserver frees them. By default glibc raises this
# threshold by itself and keeps freed blocks: 1.3 GB after some hundred bodies of 10 MB, 32 at
# a time.
_MMAP_VARIABLE, _MMAP_BYTES = "MALLOC_MMAP_THRESHOLD_", str(1 << 20)


class RuntimeDirectory:
    """``path`` holds the backend directory, the model repository, and reports, with which launcher
    and stubs talk during one run of the server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reports = path / "reports"
        self.drain_wanted = Mark(self._reports / "drain-wanted")
        """Set by the launcher: stubs must refuse new requests and finish those that they have."""
        self.end_wanted = Mark(self._reports / "end-wanted")
        """Set by the launcher: stubs must end unfinished requests with an error."""
        self._lock: int | None = None

    @classmethod
    def create(cls) -> RuntimeDirectory:
        """Make an empty directory that only this user can read."""
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
        """The directory of the launcher that started this server; None: there is no launcher."""
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
        """Prefix of the regions that the server's python backend shares with its stub. The server
        does not let clients register regions with this prefix."""
        return f"triton_python_backend_shm_region_{self.path.name}-"

    def environment(self) -> dict[str, str]:
        """Variables for the server. Temporary files of its processes are in the directory, and
        removed with it."""
        return {
            RUNTIME_VARIABLE: str(self.path),
            LAUNCHER_VARIABLE: str(os.getpid()),
            "TMPDIR": str(self.path),
            _MMAP_VARIABLE: os.environ.get(_MMAP_VARIABLE, _MMAP_BYTES),
        }

    @property
    def admin_key_file(self) -> Path:
        return self.path / "admin-key"

    def admin_key(self) -> str:
        """What a client must send to change the server. Restarts keep it."""
        if not self.admin_key_file.exists():
            self.admin_key_file.write_text(secrets.token_hex(16), encoding="ascii")
        return self.admin_key_file.read_text(encoding="ascii")

    def prepare_stub(self) -> None:
        """Called by a stub before it loads its model, and so before any request."""
        if os.environ.get(_MMAP_VARIABLE) == _MMAP_BYTES:
            del os.environ[_MMAP_VARIABLE]  # ranks allocate large blocks in each step
        for region in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            with suppress(FileNotFoundError):  # another model is being unloaded
                region.chmod(0o600)  # it holds prompts, and the server leaves it at 0644

    def own_reports(self) -> StubReports:
        """Those of this process, which is a stub."""
        return StubReports(self._reports / str(os.getpid()))

    def stub_reports(self) -> list[StubReports]:
        """Those of all stubs whose model is loaded, is being loaded, or could not be loaded."""
        return [StubReports(path) for path in self._reports.iterdir() if path.is_dir()]

    def stub_pid(self, model: str = MODEL_NAME) -> int | None:
        """Process id of the model's stub; None: the model is not loaded."""
        for reports in self.stub_reports():
            if reports.loaded.is_set() and reports.model() == model:
                return reports.pid
        return None

    def clear_reports(self) -> None:
        """Called before each start of the server."""
        if self._reports.exists():
            shutil.rmtree(self._reports)
        self._reports.mkdir()

    def processes(self) -> list[int]:
        """Ids of all processes of this server (server, stub, ranks), including orphans."""
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
        """Kill all processes of this server and wait until they are gone."""
        handles = []
        for pid in self.processes():
            with suppress(ProcessLookupError):  # it may end at any time
                handles.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(handles[-1], signal.SIGKILL)
        for handle in handles:
            wait_readable(_KILL_WAIT_S, handle)
            os.close(handle)

    def remove_shared_memory(self) -> None:
        """Remove the python backend's regions from /dev/shm; only when the server is gone."""
        for path in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def wait_readable(timeout_s: float, *descriptors: int) -> set[int]:
    """The readable ones of ``descriptors``, as soon as there are any; none after ``timeout_s``.

    A pidfd is readable once its process has ended.
    """
    poller = poll()
    for descriptor in descriptors:
        poller.register(descriptor, POLLIN)
    return {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
