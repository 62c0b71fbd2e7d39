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

# A rank's heartbeat comes every second; after this long it is stopped or its machine is.
HEARTBEAT_TIMEOUT_S = 8.0
# The same before all are ready: while CUDA begins, with every GPU of a host, no other thread of the
# rank runs.
START_HEARTBEAT_TIMEOUT_S = 60.0
# Messages of ranks are waited for at most so long at a time.
LISTEN_S = 1.0
# How long the ranks may take to end by themselves before they are killed.
STOP_TIMEOUT_S = 5.0
# How long the end of a killed one may take, which a driver or a file system can hold up.
KILL_TIMEOUT_S = 10.0
# A rank may report that its connection to another broke before the death of that other shows.
DEATH_SHOWS_S = 0.5
# Between two parallel regions a thread of the rank spins for so many loops before it sleeps. With
# libgomp's far longer default it keeps the server and the clients from cores that they share.
OPENMP_SPIN_COUNT = "2000"
_log = logging.getLogger(__name__)


class RankProcesses:
    """One process a rank, with torchrun's environment. Of other hosts' ranks, when they were heard.

    A dead rank is noticed at once (its process descriptor becomes readable), a stopped one by
    missing heartbeats. The ranks end when this process does: each watches its standard input,
    whose other end is held here, or, among several hosts, its connection.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        """``poller`` then also wakes when a rank dies."""
        self._poller = poller
        self._started: list[tuple[subprocess.Popen[bytes], int]] = []  # with a pidfd each
        # Since the last message. None until the first one: importing torch may take long and no
        # thread of the rank runs yet. The time for that is bounded by whoever waits for the ranks.
        self._silent_s: list[float | None] = []
        self.listened_s = 0.0
        """How long ranks were listened to, without pauses of this process."""
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
            num_local: the first so many ranks are started here; default: all.
            variables: more of torchrun's environment.

        Raises:
            EngineError: the system does not let one start; ``stop`` ends those before it.
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
        """The ranks of all hosts."""
        return len(self._silent_s)

    def heard_from(self, rank: int) -> None:
        """A message came from it, be it a heartbeat."""
        self._silent_s[rank] = 0.0

    def all_ready(self) -> None:
        """From now on they are watched more closely."""
        self._heartbeat_timeout_s = HEARTBEAT_TIMEOUT_S

    def check_alive(self, readable: Collection[object]) -> None:
        """Raises EngineError if a rank's descriptor is among the ``readable`` ones."""
        for rank, (process, pidfd) in enumerate(self._started):
            if pidfd in readable:
                raise EngineError(_death(rank, process.wait()))

    def check_heard(self) -> None:
        """Raises EngineError if a rank has been silent for too long, as far as it was listened to.

        To be called every ``LISTEN_S`` at least. More than that between two calls was a pause of
        this process, whose unread messages may be the rank's.
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
        """Says which rank a signal has ended, if that shows soon; others fail because of it."""
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
        """The ranks end at once, whatever they wait for, if they can run at all."""
        for process, _ in self._started:
            assert process.stdin is not None
            process.stdin.close()

    def kill(self) -> None:
        """At once, without a wait; any thread may call it, and as often as it likes."""
        for process, _ in list(self._started):
            process.kill()

    def stop(self) -> None:
        """Wait for all to end, and kill those that do not within ``STOP_TIMEOUT_S``."""
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
    """A process and a pidfd of it, or an OSError and neither."""
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
    """Those that have not ended after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    unended = []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            unended.append(process)
    return unended


def rank_environment() -> dict[str, str]:
    """What a rank inherits; whoever set the spin count himself keeps it."""
    return {"GOMP_SPINCOUNT": OPENMP_SPIN_COUNT} | child_environment()


def _death(rank: int, exit_code: int) -> str:
    death = f"rank {rank} died with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        death += " (SIGKILL: probably out of memory, see the kernel's log)"
    return death
