"""Real ranks: ``torch.distributed`` subprocesses, one message a step each way."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import zmq

from fastserve_backend.errors import ConfigError, EngineError
from fastserve_backend.executor.rank_processes import RankProcesses
from fastserve_backend.worker.messages import (
    CopyBlocks,
    CopyResult,
    Failed,
    FromRank,
    Hello,
    Ready,
    Setup,
    StageDone,
    Step,
    StepResult,
    Stop,
    encoder,
    from_rank_decoder,
)

# Copies take milliseconds. One that takes so long has lost its device or its thread, and its blocks
# with it.
COPY_TIMEOUT_S = 60.0
# While the first stage is free, how often collect() lets its caller look for arrivals.
ARRIVAL_POLL_S = 0.01
_log = logging.getLogger(__name__)


class DistributedExecutor:
    """Owns the rank processes, the socket to them and their private directory.

    Every rank gets the same messages in the same order. The first rank of each stage says when it
    has done its part of a step, that of the last stage with the tokens; a copy has ended when every
    rank has made its part of it.
    """

    def __init__(self) -> None:
        self.busy_s: list[float] = []
        """What each stage has computed so far, without waiting for other stages."""
        self._directory = Path(tempfile.mkdtemp(prefix="fastserve-ranks-"))  # mode 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._address = f"ipc://{self._directory}/engine.sock"
        self._socket.bind(self._address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._ranks = RankProcesses(self._poller)
        self._tensor_size = 1
        self._flights: dict[int, float] = {}  # unfinished step → seconds computed by its stages
        self._in_first_stage: int | None = None  # step
        self._copies: dict[int, _Copy] = {}  # unfinished, the oldest first
        self._is_broken = False
        self._closed = False

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        deadline = time.monotonic() + timeout_s
        self._tensor_size = setup.tensor_parallel_size
        self.busy_s = [0.0] * setup.pipeline_parallel_size
        rendezvous = self._directory / "rendezvous"
        self._ranks.start(
            setup.tensor_parallel_size * setup.pipeline_parallel_size,
            ["--engine", self._address, "--rendezvous", str(rendezvous)],
        )
        ready: dict[int, Ready] = {}
        while len(ready) < len(self._ranks):
            received = self._receive(deadline)
            if received is None:
                self._break(f"the ranks were not ready after {timeout_s:.0f} s")
            rank, message = received
            if isinstance(message, Hello):
                _log.info("rank %d is process %d", message.rank, message.pid)
                self._send(setup, [rank])
            elif isinstance(message, Ready):
                ready[rank] = message
        return _of_all([ready[rank] for rank in sorted(ready)])

    @property
    def can_submit(self) -> bool:
        return self._in_first_stage is None and self._num_unfinished < len(self.busy_s)

    @property
    def _num_unfinished(self) -> int:
        return len(self._flights)

    def submit(self, step: Step) -> None:
        self._send(step)
        self._flights[step.step_id] = 0.0
        self._in_first_stage = step.step_id

    def copy(self, blocks: CopyBlocks) -> None:
        self._send(blocks)
        self._copies[blocks.transfer_id] = _Copy(time.monotonic(), len(self._ranks))

    def collect(self) -> StepResult | CopyResult | None:
        while True:
            oldest = next(iter(self._copies.values()), None)
            deadline = None if oldest is None else oldest.sent_s + COPY_TIMEOUT_S
            may_submit = self.can_submit
            received = self._receive(time.monotonic() + ARRIVAL_POLL_S if may_submit else deadline)
            if received is None and may_submit:
                return None
            if received is not None:
                rank, message = received
                if isinstance(message, CopyResult):
                    result = self._end_copy(rank, message)
                    if result is not None:
                        return result
                if isinstance(message, StepResult):
                    return self._end_step(message)
                if isinstance(message, StageDone) and self._end_stage(rank, message):
                    return None
            if deadline is not None and time.monotonic() >= deadline:
                self._break(f"a copy of KV blocks has not ended in {COPY_TIMEOUT_S:.0f} s")

    def check(self) -> None:
        while (received := self._receive(time.monotonic())) is not None:
            rank, message = received
            if isinstance(message, StageDone):
                self._end_stage(rank, message)

    def kill(self) -> None:
        self._ranks.kill()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._is_broken:
            self._ranks.let_go()  # they may wait for one that is no more
        else:
            with suppress(zmq.ZMQError):
                self._send(Stop())
        self._ranks.stop()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end_stage(self, rank: int, done: StageDone) -> bool:
        """Whether that makes room for another step."""
        self.busy_s[rank // self._tensor_size] += done.busy_s
        if done.step_id in self._flights:  # its result may have come first, by a socket of its own
            self._flights[done.step_id] += done.busy_s
        if done.step_id != self._in_first_stage or rank != 0:
            return False
        self._in_first_stage = None
        return self.can_submit

    def _end_step(self, result: StepResult) -> StepResult:
        self.busy_s[-1] += result.compute_s
        result.compute_s += self._flights.pop(result.step_id)
        if result.step_id == self._in_first_stage:
            self._in_first_stage = None
        return result

    def _end_copy(self, rank: int, part: CopyResult) -> CopyResult | None:
        """The result for all ranks, if this was the last one's."""
        copy = self._copies[part.transfer_id]
        copy.num_waiting -= 1
        copy.seconds = max(copy.seconds, part.seconds)
        if part.error is not None and copy.error is None:
            copy.error = f"rank {rank}: {part.error}"
        if copy.num_waiting:
            return None
        del self._copies[part.transfer_id]
        return CopyResult(part.transfer_id, copy.seconds, copy.error)

    def _send(
        self, message: Setup | Step | CopyBlocks | Stop, ranks: Sequence[int] | None = None
    ) -> None:
        """To ``ranks``, or to all."""
        data = encoder.encode(message)
        for rank in range(len(self._ranks)) if ranks is None else ranks:
            self._socket.send_multipart([b"rank-%d" % rank, data])

    def _receive(self, deadline: float | None) -> tuple[int, FromRank] | None:
        """The next message and the rank it is from; None once ``deadline`` (monotonic seconds) has
        passed."""
        while True:
            now = time.monotonic()
            wait_s = 1.0 if deadline is None else min(1.0, max(0.0, deadline - now))
            readable = dict(self._poller.poll(int(wait_s * 1000)))
            if self._socket in readable:
                identity, data = self._socket.recv_multipart()
                rank = int(identity.rpartition(b"-")[2])
                self._ranks.heard_from(rank)
                message: FromRank = from_rank_decoder.decode(data)
                if isinstance(message, Failed):
                    self._fail(message)
                self._watch(())  # the heartbeats of some must not hide the silence of others
                return rank, message
            self._watch(readable)
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def _watch(self, readable: Collection[object]) -> None:
        try:
            self._ranks.check_alive(readable)
            self._ranks.check_heard()
        except EngineError:
            self._is_broken = True
            raise

    def _fail(self, failed: Failed) -> NoReturn:
        if failed.user_error:
            self._is_broken = True
            raise ConfigError(failed.reason)
        self._break(self._ranks.find_killed() or failed.reason)

    def _break(self, reason: str) -> NoReturn:
        self._is_broken = True
        raise EngineError(reason)


@dataclass(slots=True)
class _Copy:
    """A copy that not every rank has made."""

    sent_s: float
    num_waiting: int
    seconds: float = 0.0
    """The slowest rank's so far."""
    error: str | None = None


def _of_all(ready: Sequence[Ready]) -> Ready:
    """What the ranks can do together: each has its part of every block."""
    return Ready(
        num_blocks=min(one.num_blocks for one in ready),
        num_host_blocks=min(one.num_host_blocks for one in ready),
        block_bytes=sum(one.block_bytes for one in ready),
        block_out_s=max(one.block_out_s for one in ready),
        block_in_s=max(one.block_in_s for one in ready),
        hardware=ready[0].hardware,
        dtype=ready[0].dtype,
    )
