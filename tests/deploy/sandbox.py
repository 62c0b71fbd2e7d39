"""Runs a command under a container's limits without a container engine, by bubblewrap."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import wait_for

_REPLACED = {"dev", "proc", "sys", "tmp", "run", "etc", "cache"}
_ETC = ("passwd", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0


@dataclass
class Container:
    """Runs ``command`` as process 1 of its own tree, without capabilities. Its root is this
    machine's, read-only, with an empty writable /tmp and /dev/shm.
    """

    command: list[str]
    user: str
    """``UID:GID`` in a user namespace, in which the files of the user who runs the test are
    readable."""
    environment: dict[str, str]
    read_only: dict[Path, str]
    """Mounts besides the machine's own directories: source, then place."""
    writable: dict[Path, str]
    hosts: str = ""
    """Host names that lead to 127.0.0.1, besides localhost."""
    network_of: RunningContainer | None = None

    @contextmanager
    def run(self, log_path: Path) -> Iterator[RunningContainer]:
        """Runs until the block is left, then must end with exit code 0 on SIGTERM."""
        _require_tools()
        with tempfile.TemporaryDirectory() as work, log_path.open("wb") as log:
            hosts = Path(work, "hosts")
            hosts.write_text(f"127.0.0.1 localhost {self.hosts}\n", encoding="utf-8")
            read_end, write_end = os.pipe()
            with subprocess.Popen(
                [*self._entered_network(), *self._sandbox(hosts, write_end), *self.command],
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
            ) as process:
                os.close(write_end)
                try:
                    with os.fdopen(read_end, encoding="utf-8") as info:
                        running = RunningContainer(json.load(info)["child-pid"], process, log_path)
                    running.environment = self.environment
                    yield running
                    os.kill(running.pid, signal.SIGTERM)
                    assert process.wait(STOP_TIMEOUT_S) == 0, running.log()
                finally:
                    process.kill()

    def _entered_network(self) -> list[str]:
        if self.network_of is None:
            return []
        return ["nsenter", *_user_namespace(self.network_of.pid), "--net"]

    def _sandbox(self, hosts: Path, info: int) -> list[str]:
        uid, gid = self.user.split(":")
        flags = ["bwrap", "--unshare-user", "--uid", uid, "--gid", gid, "--cap-drop", "ALL"]
        flags += ["--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts"]
        flags += ["--die-with-parent", "--info-fd", str(info), "--clearenv"]
        if self.network_of is None:
            flags.append("--unshare-net")
        for name, value in self.environment.items():
            flags += ["--setenv", name, value]
        for entry in sorted(Path("/").iterdir()):
            if entry.is_symlink():
                flags += ["--symlink", str(entry.readlink()), str(entry)]
            elif entry.is_dir() and entry.name not in _REPLACED:
                flags += ["--ro-bind", str(entry), str(entry)]
        flags += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp"]
        for name in _ETC:
            flags += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        flags += ["--ro-bind", str(hosts), "/etc/hosts"]
        for source, target in self.read_only.items():
            flags += ["--ro-bind", str(source), target]
        for source, target in self.writable.items():
            flags += ["--bind", str(source), target]
        return [*flags, "--remount-ro", "/", "--"]


@dataclass
class RunningContainer:
    pid: int
    """The process id of its process 1 on this machine."""
    process: subprocess.Popen[bytes]
    log_path: Path
    environment: dict[str, str] | None = None

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as ``docker exec`` does."""
        enter = ["nsenter", *_user_namespace(self.pid), "--net", "--mount", "--pid"]
        return subprocess.run(
            [*enter, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )

    def until_logged(self, text: str, timeout_s: float) -> None:
        def is_logged() -> bool:
            assert self.process.poll() is None, self.log()
            return text in self.log()

        wait_for(is_logged, timeout_s)

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")


def _user_namespace(pid: int) -> list[str]:
    return ["--target", str(pid), "--user", "--preserve-credentials"]


def _require_tools() -> None:
    for tool in ("bwrap", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        pytest.skip("the tests run in a user namespace, whose containers nobody can enter")
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", sys.executable, "-c", ""]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    if done.returncode:
        pytest.skip(f"bubblewrap does not work here: {done.stderr.strip()}")
