"""A test's own tritonserver on free ports, and its ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.runtime import RuntimeDirectory
from tiny_model import START_TIMEOUT_S


@contextmanager
def running_server(config: EngineConfig, log_path: Path) -> Iterator[TritonServer]:
    """Runs a server that has generated a token when the block begins, and is gone after it."""
    server = TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
    server.start(START_TIMEOUT_S)
    try:
        yield server
    finally:
        server.stop()


def rank_pids(runtime: RuntimeDirectory) -> set[int]:
    found = set()
    for pid in runtime.processes():
        with suppress(OSError):  # the process has just ended
            if b"fastserve_backend.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def rank_pid(runtime: RuntimeDirectory) -> int:
    (pid,) = rank_pids(runtime)
    return pid


@contextmanager
def rank_stopped(runtime: RuntimeDirectory) -> Iterator[int]:
    """The only rank stands still until the block ends, so no job ends. Yields its process id."""
    pid = rank_pid(runtime)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)
