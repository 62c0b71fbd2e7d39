"""The processes of the ranks on this host: started, watched, stopped."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

import zmq

from fastserve_backend.errors import EngineError
from fastserve_backend.system.interpreter import child_environment, python_executable

# A rank sends a heartbeat every second. After this long without one, it or its machine has stopped.
HEARTBEAT_TIMEOUT_S = 8.0
# The same before all ranks are ready: while CUDA initializes all GPUs of a host, no other thread of
# a rank runs.
START_HEARTBEAT_TIMEOUT_S = 60.0
# Longest single wait for messages of ranks.
LISTEN_S = 1.0
# How long ranks may take to end by themselves before they are killed.
STOP_TIMEOUT_S = 5.0
# How long a killed rank may take to end, which a driver or a file system can delay.
KILL_TIMEOUT_S = 10.0
# A rank may report a broken connection to another rank before the death of the other is visible.
DEATH_SHOWS_S = 0.5
# Of ranks, where the user has set no others.
DEFAULT_VARIABLES = {
    # How many loops a thread spins between two parallel regions before it sleeps. libgomp's default
    # is far longer, and keeps server and clients from cores that they share with the ranks.
    "GOMP_SPINCOUNT": "2000",
    # Huge pages for all memory, small tensors included (glibc 2.35 and newer): a step reads every
    # weight, and the processor searches for the address of each page. Tensors below 32 MiB lie side
    # by side, where large pages hold several.
    "GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={32 * 2**20}",
}
_log = logging.getLogger(__name__)


class RankProcesses:
    """One process for each rank of this host, and the heartbeats of all ranks.

    A dead rank is noticed at once: its process descriptor becomes readable. A stopped one is
    noticed by missing heartbeats. The ranks end when this process does: each watches its standard
    input, whose other end is held here, or with several hosts its connection.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        """``poller`` also wakes when a rank dies."""
        self._poller = poller
        self._started: list[tuple[subprocess.Popen[bytes], int]] = []  # with a pidfd each
        # Seconds since each rank's last message. None until the first: importing torch may take
        # long, and no thread sends heartbeats yet. Whoever waits for the ranks bounds that time.
        self._silent_s: list[float | None] = []
        self.listened_s = 0.0
        """Seconds for which ranks were listened to, without pauses of this process."""
        self._checked_s = time.monotonic()
        self._heartbeat_timeout_s = START_HEARTBEAT_TIMEOUT_S

    def start(
        self,
        num_ranks: int,
        arguments: Sequence[str],
        *,
        num_local: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            num_ranks: of all hosts.
            arguments: those of ``python -m fastserve_backend.worker``.
            num_local: number of ranks to start on this host, the first ones; default: all.
            variables: more environment variables.

        Raises:
            EngineError: a process cannot be started; ``stop`` ends those before it.
        """
        num_local = num_ranks if num_local is None else num_local
        command = [python_executable(), "-m", "fastserve_backend.worker", *arguments]
        environment = rank_environment() | dict(variables or {})
        environment |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_local)}
        self._silent_s = [None] * num_ranks
        for rank in range(num_local):
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                process, pidfd = _start(command, environment)
            except OSError as error:
                raise EngineError(f"rank {rank} cannot be started: {error}") from None
            self._started.append((process, pidfd))
            self._poller.register(pidfd, zmq.POLLIN)

    def __len__(self) -> int:
        """Number of ranks on all hosts."""
        return len(self._silent_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks on this host."""
        return tuple(process.pid for process, _ in self._started)

    def on_message(self, rank: int) -> None:
        """A message came from the rank; heartbeats count too."""
        self._silent_s[rank] = 0.0

    def on_all_ready(self) -> None:
        """All ranks have loaded: from now on ``HEARTBEAT_TIMEOUT_S`` applies."""
        self._heartbeat_timeout_s = HEARTBEAT_TIMEOUT_S

    def check_alive(self, readable: Collection[object]) -> None:
        """Raises EngineError if a rank's descriptor is among the ``readable`` ones."""
        for rank, (process, pidfd) in enumerate(self._started):
            if pidfd in readable:
                raise EngineError(_death(rank, process.wait()))

    def check_heard(self) -> None:
        """Raises EngineError if a rank has been silent for too long.

        Must be called every ``LISTEN_S`` at least. A longer time between two calls counts as
        ``LISTEN_S``: this process was paused then, and messages of the rank may lie unread.
        """
        now, limit_s = time.monotonic(), self._heartbeat_timeout_s
        passed_s = min(now - self._checked_s, LISTEN_S)
        self._checked_s = now
        self.listened_s += passed_s
        for rank, silent_s in enumerate(self._silent_s):
            if silent_s is None:
                continue
            self._silent_s[rank] = silent_s = silent_s + passed_s
            if silent_s > limit_s:
                raise EngineError(f"rank {rank} has not answered for {limit_s:.0f} s")

    def find_killed(self) -> str | None:
        """Describes the rank that a signal has ended; None if none shows within ``DEATH_SHOWS_S``.

        Other ranks fail because of it, and their errors say less.
        """
        deadline = time.monotonic() + DEATH_SHOWS_S
        while True:
            alive = select.poll()
            for rank, (process, pidfd) in enumerate(self._started):
                code = process.poll()
                if code is None:
                    alive.register(pidfd, select.POLLIN)
                elif code < 0:
                    return _death(rank, code)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            alive.poll(left_s * 1000)

    def let_go(self) -> None:
        """Let the ranks end: at once, whatever they wait for, unless they are stopped."""
        for process, _ in self._started:
            assert process.stdin is not None
            process.stdin.close()

    def kill(self) -> None:
        """Kill the ranks of this host and return. Any thread may call it, any number of times."""
        for process, _ in list(self._started):
            process.kill()

    def stop(self) -> None:
        """Wait for all ranks to end; kill those that do not end within ``STOP_TIMEOUT_S``."""
        processes = [process for process, _ in self._started]
        for process in _unended(processes, STOP_TIMEOUT_S):
            process.kill()
        for process in _unended(processes, KILL_TIMEOUT_S):
            _log.error("process %d of a rank does not end although it was killed", process.pid)
        for process, pidfd in self._started:
            assert process.stdin is not None
            process.stdin.close()
            self._poller.unregister(pidfd)
            os.close(pidfd)
        self._started.clear()
        self._silent_s.clear()


def _start(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process and open its pidfd. If that raises OSError, no process is left."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.communicate()  # closes its standard input
        raise


def _unended(
    processes: Sequence[subprocess.Popen[bytes]], timeout_s: float
) -> list[subprocess.Popen[bytes]]:
    """The processes that have not ended after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    unended = []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            unended.append(process)
    return unended


def rank_environment() -> dict[str, str]:
    """Environment of a rank."""
    return DEFAULT_VARIABLES | child_environment()


def _death(rank: int, exit_code: int) -> str:
    death = f"rank {rank} died with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        death += " (SIGKILL: probably out of memory, see the kernel's log)"
    return death
