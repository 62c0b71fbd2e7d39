"""Fixtures: ranks that skip slow imports.

A small model's rank spends most of its start, a processor second, on importing torch. Modules that
start many engines use ``forked_ranks``: a process that has imported torch forks their ranks. A test
of other modules may use ``forked_ranks_here``. All other ranks, and all ranks of servers, start as
in the product.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import pytest
from fastserve_backend.executor import rank_processes

SERVER = Path(__file__).with_name("rank_fork_server.py")
RANK = [sys.executable, "-m", "fastserve_backend.worker"]


class ForkedProcess:
    """The part of ``subprocess.Popen`` that ``RankProcesses`` uses."""

    def __init__(self, command: Sequence[str], pid: int, stdin: IO[bytes], end: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self._command = command
        self._end = end
        """Of a pipe that brings the status when the process has ended."""
        self._lock = threading.Lock()
        self._returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None:
            poller = select.poll()
            poller.register(self._end, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self._command, timeout)
        with self._lock:
            if self._returncode is None:
                self._returncode = os.waitstatus_to_exitcode(int(os.read(self._end, 16)))
                os.close(self._end)
            return self._returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Ends with this process, which holds its socket.

    Args:
        program: of its ranks, as module:function.
    """

    def __init__(self, program: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # It runs with a rank's environment, which libraries read when they are loaded.
            environment = rank_processes.rank_environment()
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), program], stdin=theirs, env=environment
            )
        self._lock = threading.Lock()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[ForkedProcess, int]:
        """As ``rank_processes._start``."""
        request = {
            "arguments": command[len(RANK) - 1 :],
            "variables": dict(environment),
            "directory": os.getcwd(),
        }
        read_stdin, write_stdin = os.pipe()
        read_end, write_end = os.pipe()
        passed = [read_stdin, 1, 2, write_end]
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], passed)
            answer, (pidfd,), _, _ = socket.recv_fds(self._socket, 16, 1)
        os.close(read_stdin)
        os.close(write_end)
        stdin = os.fdopen(write_stdin, "wb")
        return ForkedProcess(command, int(answer), stdin, read_end), pidfd


@cache
def fork_server(program: str = "fastserve_backend.worker.__main__:main") -> ForkServer:
    return ForkServer(program)


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Forks ranks of engines in this process, if they run the product's program."""
    yield from forking(fork_server)


@pytest.fixture
def forked_ranks_here() -> Iterator[None]:
    """``forked_ranks`` for one test of a module whose others start ranks as the product does."""
    yield from forking(fork_server)


def forking(server: Callable[[], ForkServer]) -> Iterator[None]:
    """Forks ranks from this server meanwhile."""
    start = rank_processes._start

    def fork_or_start(command: Sequence[str], environment: Mapping[str, str]) -> object:
        if list(command[: len(RANK)]) != RANK:
            return start(command, environment)
        return server().start(command, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "_start", fork_or_start)
        yield
