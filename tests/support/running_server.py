"""A test's own tritonserver on free ports, and its ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.runtime import RuntimeDirectory
from held_thread import main_thread_held
from serving_client import settle, unfinished_jobs
from tiny_model import START_TIMEOUT_S
from waiting import wait_for

T = TypeVar("T")
ATTEMPTS = 10
SLICE_S = 0.01


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
    """The only rank. Waits while a process that it has just forked has its name, too."""
    found: set[int] = set()

    def is_alone() -> bool:
        nonlocal found
        found = rank_pids(runtime)
        return len(found) == 1

    wait_for(is_alone)
    return found.pop()


@contextmanager
def rank_stopped(runtime: RuntimeDirectory) -> Iterator[int]:
    """The only rank computes nothing until the block ends, so no job ends. Its heartbeats go on, or
    the engine would replace it. Yields its process id."""
    pid = rank_pid(runtime)
    with main_thread_held(pid):
        yield pid


@contextmanager
def slow_rank(runtime: RuntimeDirectory, pause: int) -> Iterator[None]:
    """The only rank stands still for ``pause`` times as long as it runs."""
    if not pause:
        yield
        return
    over = threading.Event()

    def hold_and_release() -> None:
        while not over.wait(SLICE_S):
            with rank_stopped(runtime):
                over.wait(pause * SLICE_S)

    thread = threading.Thread(target=hold_and_release, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def job_held(server: TritonServer, start: Callable[[], T], num_jobs: int = 1) -> Iterator[T]:
    """A job that has tokens and cannot end before the block does, however fast the machine decodes.

    Args:
        server: an idle one with one rank, which stands still during the block.
        start: sends a long job, and returns what reads it once its first token is here. It is
            called again, with a slower rank, if the job ends before its rank is stopped: the
            reader, such as a browser, may be far slower than the rank.
        num_jobs: how many jobs ``start`` sends. None of them ends before the block does.

    Yields what ``start`` returned. The metrics already count the jobs.
    """
    for attempt in range(ATTEMPTS):
        with slow_rank(server.runtime, 2**attempt - 1):
            started = start()
        with rank_stopped(server.runtime):
            settle(server.endpoints)
            if unfinished_jobs(server.endpoints.metrics_url) >= num_jobs:
                yield started
                return
    raise AssertionError(f"a job ended {ATTEMPTS} times before its rank was stopped")
