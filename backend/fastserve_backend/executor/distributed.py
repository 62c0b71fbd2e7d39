"""Real ranks: ``torch.distributed`` subprocesses, one message a step each way."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import zmq

from fastserve_backend.errors import ConfigError, EngineError
from fastserve_backend.interpreter import python_executable
from fastserve_backend.worker.messages import (
    CopyBlocks,
    CopyResult,
    Failed,
    FromRank,
    Hello,
    Ready,
    Setup,
    Step,
    StepResult,
    Stop,
    encoder,
    from_rank_decoder,
)

# A rank's heartbeat comes every second; after this long it is stopped or its machine is.
HEARTBEAT_TIMEOUT_S = 8.0
# Copies take milliseconds. One that takes so long has lost its device or its thread, and its blocks
# with it.
COPY_TIMEOUT_S = 60.0
# While nothing but copies is under way, how often collect() lets its caller look for arrivals.
ARRIVAL_POLL_S = 0.01
# How long a rank may take to end by itself after Stop before it is killed.
STOP_TIMEOUT_S = 5.0
# Between two parallel regions a thread of the rank spins for so many loops before it sleeps. With
# libgomp's far longer default it keeps the server and the clients from cores that they share.
OPENMP_SPIN_COUNT = "2000"
_log = logging.getLogger(__name__)


class DistributedExecutor:
    """Owns the rank processes, the socket to them and their private directory.

    A dead rank is noticed at once (its process descriptor becomes readable), a stopped one by
    missing heartbeats. The ranks end when this process does: each watches its standard input,
    whose other end is held here.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fastserve-ranks-"))  # mode 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._address = f"ipc://{self._directory}/engine.sock"
        self._socket.bind(self._address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        # None until the first message: importing torch may take long and no thread of the rank runs
        # yet. The time for that is bounded by start().
        self._last_heard_s: float | None = None
        self._num_unfinished = 0
        self._copies: dict[int, float] = {}  # unfinished → when it was sent, the oldest first
        self._closed = False

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        deadline = time.monotonic() + timeout_s
        self._spawn()
        while True:
            message = self._receive(deadline)
            if isinstance(message, Hello):
                _log.info("rank %d is process %d", message.rank, message.pid)
                self._send(setup)
            elif isinstance(message, Ready):
                return message
            elif message is None:
                raise EngineError(f"the ranks were not ready after {timeout_s:.0f} s")

    @property
    def can_submit(self) -> bool:
        return self._num_unfinished == 0

    def submit(self, step: Step) -> None:
        self._send(step)
        self._num_unfinished += 1

    def copy(self, blocks: CopyBlocks) -> None:
        self._send(blocks)
        self._copies[blocks.transfer_id] = time.monotonic()

    def collect(self) -> StepResult | CopyResult | None:
        while True:
            oldest_s = next(iter(self._copies.values()), None)
            deadline = None if oldest_s is None else oldest_s + COPY_TIMEOUT_S
            is_computing = self._num_unfinished > 0
            message = self._receive(deadline if is_computing else time.monotonic() + ARRIVAL_POLL_S)
            if isinstance(message, CopyResult):
                del self._copies[message.transfer_id]
                return message
            if deadline is not None and time.monotonic() >= deadline:
                raise EngineError(f"a copy of KV blocks has not ended in {COPY_TIMEOUT_S:.0f} s")
            if isinstance(message, StepResult):
                self._num_unfinished -= 1
                return message
            if message is None and not is_computing:
                return None

    def check(self) -> None:
        while self._receive(time.monotonic()) is not None:
            pass

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._process is not None:
            self._stop(self._process)
            os.close(self._pidfd)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self) -> None:
        command = [python_executable(), "-m", "fastserve_backend.worker"]
        command += ["--engine", self._address, "--rendezvous", str(self._directory / "rendezvous")]
        environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        environment.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
        # The rank imports what this process imports, whatever path it was set up with.
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._poller.register(self._pidfd, zmq.POLLIN)

    def _send(self, message: Setup | Step | CopyBlocks | Stop) -> None:
        self._socket.send_multipart([b"rank-0", encoder.encode(message)])

    def _receive(self, deadline: float | None) -> FromRank | None:
        """The next message; None once ``deadline`` (monotonic seconds) has passed."""
        while True:
            now = time.monotonic()
            wait_s = 1.0 if deadline is None else min(1.0, max(0.0, deadline - now))
            ready = dict(self._poller.poll(int(wait_s * 1000)))
            if self._socket in ready:
                self._last_heard_s = time.monotonic()
                _, data = self._socket.recv_multipart()
                message: FromRank = from_rank_decoder.decode(data)
                if isinstance(message, Failed):
                    raise (ConfigError if message.user_error else EngineError)(message.reason)
                return message
            if self._pidfd in ready:
                assert self._process is not None
                raise EngineError(f"rank 0 died with exit code {self._process.wait()}")
            now = time.monotonic()
            silent_s = 0.0 if self._last_heard_s is None else now - self._last_heard_s
            if silent_s > HEARTBEAT_TIMEOUT_S:
                raise EngineError(f"rank 0 has not answered for {HEARTBEAT_TIMEOUT_S:.0f} s")
            if deadline is not None and now >= deadline:
                return None

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([b"rank-0", encoder.encode(Stop())], zmq.NOBLOCK)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
