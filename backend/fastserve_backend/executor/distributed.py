"""Real ranks: ``torch.distributed`` processes, one message a step each way."""

from __future__ import annotations

import errno
import logging
import math
import tempfile
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from fastserve_backend.errors import ConfigError, EngineError
from fastserve_backend.executor.cluster import Cluster, LostRanks, connection_closed
from fastserve_backend.executor.rank_processes import LISTEN_S, RankProcesses
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
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
from fastserve_backend.system.temporary_directory import short_temporary_directory

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

# Copies take milliseconds. One that takes this long after the steps before it have ended has lost
# its device or its thread.
COPY_TIMEOUT_S = 60.0
# A step that takes this long hangs on its device, although the rank's heartbeats go on.
STEP_TIMEOUT_S = 600.0
# While the first stage is free, collect() returns this often: its caller looks for what is due.
ARRIVAL_POLL_S = 0.01
_log = logging.getLogger(__name__)
# Longest path of the directory for temporary files. The address of a Unix socket is short, and the
# socket's own name needs the rest of it.
_MOST_PARENT_BYTES = 70


class DistributedExecutor:
    """Owns the rank processes of this host, the socket to all ranks and their private directory.

    Every rank gets the same messages in the same order. The first rank of each pipeline stage
    reports when it has done its part of a step; in the last stage, with the tokens. A copy has
    ended when every rank has made its part of it.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        num_early_ranks: int = 0,
        arrivals: int | None = None,
    ) -> None:
        """
        Args:
            cluster: needed if ranks run on other hosts; the caller closes it.
            num_early_ranks: without a cluster, so many processes start now. They import torch while
                the caller prepares `start`. 0: they start then.
            arrivals: a descriptor. As soon as it is readable, `collect` returns while the first
                stage is free.

        Raises:
            ConfigError: the cluster's address cannot be listened on.
            EngineError: a process cannot be started.
        """
        self.busy_s: list[float] = []
        """Seconds that each stage has computed so far, without waits for other stages."""
        self._cluster = cluster
        self.arrivals = arrivals
        """As of the constructor. It may be set until `start`."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # By default ZeroMQ silently drops messages to a rank that is a thousand messages behind.
        # Without that limit the queue stays short all the same: each copy needs blocks of its own,
        # and few steps are unfinished at a time.
        self._socket.set_hwm(0)
        self._identities: dict[int, bytes] = {}  # rank → of its main socket
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._lost: LostRanks | None = None
        if cluster is None:
            # Its mode is 0700. It is removed at the program's end at the latest.
            self._directory = tempfile.TemporaryDirectory(
                prefix="fastserve-ranks-",
                dir=short_temporary_directory(_MOST_PARENT_BYTES),
                ignore_cleanup_errors=True,
            )
            self._address = f"ipc://{self._directory.name}/engine.sock"
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(self._address)
        else:
            self._address = cluster.engine_address
            try:
                self._authenticator = cluster.bind(self._socket)
            except BaseException:
                self._context.destroy(linger=0)
                raise
            self._lost = LostRanks(self._socket, self._identities, cluster.num_local_ranks)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._ranks = RankProcesses(self._poller)
        self._tensor_size = 1
        self._flights: dict[int, _UnfinishedStep] = {}  # of the unfinished steps
        self._left_s: list[float] = []  # when the latest step left each stage
        # When the oldest of ``_flights`` became the oldest, in RankProcesses.listened_s.
        self._oldest_since_s = 0.0
        self._in_first_stage: int | None = None  # the step that the first stage runs
        self._copies: dict[int, _UnfinishedCopy] = {}  # unfinished, the oldest first
        self._is_broken = False
        self._closed = False
        if cluster is None and num_early_ranks:
            try:
                self._start_local(num_early_ranks)
            except BaseException:
                self.close()
                raise

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        deadline = time.monotonic() + timeout_s
        self._tensor_size = setup.tensor_parallel_size
        self.busy_s = [0.0] * setup.pipeline_parallel_size
        self._left_s = [-math.inf] * setup.pipeline_parallel_size
        setup = self._start_processes(setup)
        ready: dict[int, Ready] = {}
        while len(ready) < len(self._ranks):
            received = self._receive(deadline)
            if received is None:
                self._break(self._describe_missing(ready, timeout_s))
            rank, message = received
            if isinstance(message, Hello):
                _log.info("rank %d is process %d on %s", rank, message.pid, message.host)
                self._send(setup, [rank])
            elif isinstance(message, Ready):
                ready[rank] = message
        self._ranks.on_all_ready()
        combined = self._combine([ready[rank] for rank in sorted(ready)])
        return msgspec.structs.replace(combined, local_pids=self._ranks.pids)

    def _start_processes(self, setup: Setup) -> Setup:
        """Start the ranks of this host; returns the setup to send to all ranks."""
        num_ranks = setup.tensor_parallel_size * setup.pipeline_parallel_size
        if self._cluster is None:
            if not len(self._ranks):
                self._start_local(num_ranks)
            return setup
        self._cluster.start_agent()
        self._ranks.start(
            num_ranks,
            ["--engine", self._address],
            num_local=self._cluster.num_local_ranks,
            variables=self._cluster.rank_variables,
        )
        return msgspec.structs.replace(setup, start_id=uuid.uuid4().hex)

    def _start_local(self, num_ranks: int) -> None:
        assert self._directory is not None
        rendezvous = f"{self._directory.name}/ranks"
        self._ranks.start(num_ranks, ["--engine", self._address, "--rendezvous", rendezvous])

    def _describe_missing(self, ready: Collection[int], timeout_s: float) -> str:
        missing = [rank for rank in range(len(self._ranks)) if rank not in ready]
        reason = f"rank {', '.join(map(str, missing))} has not come up after {timeout_s:.0f} s"
        if self._cluster is not None:
            absent = [rank for rank in missing if rank not in self._identities]
            reason += self._cluster.describe_missing(absent)
        return reason

    def _combine(self, ready: Sequence[Ready]) -> Ready:
        """What the ranks are as a whole: each has its part of every block."""
        hardware = ready[0].hardware
        if self._cluster is not None:  # a network between ranks changes iteration times
            hardware += f", {self._cluster.parallel.nnodes} hosts"
        return Ready(
            num_blocks=min(one.num_blocks for one in ready),
            num_host_blocks=min(one.num_host_blocks for one in ready),
            block_bytes=sum(one.block_bytes for one in ready),
            block_out_s=max(one.block_out_s for one in ready),
            block_in_s=max(one.block_in_s for one in ready),
            hardware=hardware,
            dtype=ready[0].dtype,
            num_disk_blocks=min(one.num_disk_blocks for one in ready),
            disk_write_s=max(one.disk_write_s for one in ready),
            disk_read_s=max(one.disk_read_s for one in ready),
            disk_error=next((one.disk_error for one in ready if one.disk_error), None),
        )

    @property
    def listened_s(self) -> float:
        return self._ranks.listened_s

    @property
    def can_submit(self) -> bool:
        return self._in_first_stage is None and len(self._flights) < len(self.busy_s)

    @property
    def can_submit_ahead(self) -> bool:
        # With several stages, the last one has the tokens while the first runs another step.
        return len(self.busy_s) == 1 and len(self._flights) == 1

    def submit(self, step: Step) -> None:
        self._send(step)
        if not self._flights:
            self._oldest_since_s = self._ranks.listened_s
        self._flights[step.step_id] = _UnfinishedStep(time.monotonic())
        self._in_first_stage = step.step_id

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        self._send(blocks)
        behind = next(reversed(self._flights.values()), None)
        # A disk may hang, and only those who read from it wait for that.
        sent_s = math.inf if isinstance(blocks, DiskCopy) else self._ranks.listened_s
        self._copies[blocks.transfer_id] = _UnfinishedCopy(sent_s, behind, len(self._ranks))

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        return_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            received = self._receive_or_arrival() if self.can_submit else self._receive(return_s)
            if received is None:
                return None
            rank, message = received
            if isinstance(message, CopyResult):
                result = self._end_copy(rank, message)
                if result is not None:
                    return result
            if isinstance(message, StepResult):
                return self._end_step(message)
            if isinstance(message, StageDone) and self._end_stage(rank, message):
                return None

    def _receive_or_arrival(self) -> tuple[int, FromRank] | None:
        """The next message and its rank; None after ``ARRIVAL_POLL_S``, or sooner if there is an
        arrival."""
        deadline = time.monotonic() + ARRIVAL_POLL_S
        if self.arrivals is None:
            return self._receive(deadline)
        self._poller.register(self.arrivals, zmq.POLLIN)
        try:
            return self._receive(deadline)
        finally:
            self._poller.unregister(self.arrivals)

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
            # Ranks may wait for one that is gone. Those of other hosts end with the connection.
            self._ranks.let_go() if self._cluster is None else self._ranks.kill()
        else:
            with suppress(zmq.ZMQError, EngineError):
                self._send(Stop())
        self._ranks.stop()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._directory is not None:
            self._directory.cleanup()

    def _end_stage(self, rank: int, done: StageDone) -> bool:
        """A stage has done its part. Returns whether there is room for another step now."""
        flight = self._flights.get(done.step_id)
        # None if the step's result came first: that has a socket of its own.
        self._on_left_stage(rank // self._tensor_size, flight, done.busy_s)
        if done.step_id != self._in_first_stage or rank != 0:
            return False
        self._in_first_stage = None
        return self.can_submit

    def _on_left_stage(self, stage: int, flight: _UnfinishedStep | None, busy_s: float) -> None:
        """A step has left the stage."""
        self.busy_s[stage] += busy_s
        now_s = time.monotonic()
        if flight is not None:
            flight.compute_s += busy_s
            if stage > 0:  # the first stage was free when the step was sent
                flight.waited_s += max(0.0, self._left_s[stage] - flight.left_s)
            flight.left_s = now_s
        self._left_s[stage] = now_s

    def _end_step(self, result: StepResult) -> StepResult:
        flight = self._flights.pop(result.step_id)
        self._on_left_stage(len(self.busy_s) - 1, flight, result.compute_s)
        result.compute_s, result.waited_s = flight.compute_s, flight.waited_s
        self._oldest_since_s = flight.ended_s = self._ranks.listened_s
        if result.step_id == self._in_first_stage:
            self._in_first_stage = None
        return result

    def _end_copy(self, rank: int, part: CopyResult) -> CopyResult | None:
        """One rank has made its part. Returns the result of the whole copy after the last one."""
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
        self,
        message: Setup | Step | CopyBlocks | DiskCopy | Stop,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Send to ``ranks``, or to all."""
        data = encoder.encode(message)
        for rank in self._identities if ranks is None else ranks:
            try:
                self._socket.send_multipart([self._identities[rank], data])
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._break(self._find_lost() or connection_closed(rank))

    def _receive(self, deadline: float | None) -> tuple[int, FromRank] | None:
        """The next message and its rank; None if ``deadline`` (monotonic seconds) passes first."""
        while True:
            now = time.monotonic()
            wait_s = LISTEN_S if deadline is None else min(LISTEN_S, max(0.0, deadline - now))
            readable = dict(self._poller.poll(math.ceil(wait_s * 1000)))
            if self._socket in readable:
                identity, data = self._socket.recv_multipart()
                message: FromRank = from_rank_decoder.decode(data)
                rank = self._rank_of(identity, message)
                if rank is not None:
                    self._ranks.on_message(rank)
                    if isinstance(message, Failed):
                        self._fail(message)
                self._watch(())  # also while messages of other ranks keep coming
                if rank is not None:
                    return rank, message
            else:
                has_arrived = readable.pop(self.arrivals, 0) != 0
                self._watch(readable)
                if has_arrived:
                    return None
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def _rank_of(self, identity: bytes, message: FromRank) -> int | None:
        """The rank that sent ``message``; None if the sender is not one of this engine's ranks.

        Raises:
            EngineError: a rank has been started a second time.
        """
        _, number, token = identity.rsplit(b"-", 2)
        rank = int(number)
        if isinstance(message, Hello) and rank < len(self._ranks):
            if rank in self._identities:
                # If it ended a moment ago, that is the better error.
                self._break(self._find_lost() or f"rank {rank} began anew, on {message.host}")
            self._identities[rank] = identity
        elif not self._identities.get(rank, b"").endswith(token):
            # On another host, a rank of an earlier start may be about to end, or one was started by
            # mistake.
            _log.debug("ignored a message of a rank %d that is not of this engine", rank)
            return None
        return rank

    def _watch(self, readable: Collection[object]) -> None:
        try:
            if self._lost is not None:
                # Checked first: a rank of this host may have ended because another host's is lost.
                self._lost.check(at_once=bool(readable))
            self._ranks.check_alive(readable)
            self._ranks.check_heard()
            self._check_overdue()
        except EngineError:
            self._is_broken = True
            raise

    def _check_overdue(self) -> None:
        now_s = self._ranks.listened_s
        if self._flights and now_s - self._oldest_since_s > STEP_TIMEOUT_S:
            raise EngineError(f"a step has not ended in {STEP_TIMEOUT_S:.0f} s")
        since_s = min((copy.since_s for copy in self._copies.values()), default=now_s)
        if now_s - since_s > COPY_TIMEOUT_S:
            raise EngineError(f"a copy of KV blocks has not ended in {COPY_TIMEOUT_S:.0f} s")

    def _fail(self, failed: Failed) -> NoReturn:
        if failed.user_error:
            self._is_broken = True
            raise ConfigError(failed.reason)
        self._break(self._ranks.find_killed() or self._find_lost() or failed.reason)

    def _find_lost(self) -> str | None:
        """Describes a lost rank of another host; None if there is none."""
        return None if self._lost is None else self._lost.find()

    def _break(self, reason: str) -> NoReturn:
        self._is_broken = True
        raise EngineError(reason)


@dataclass(slots=True)
class _UnfinishedStep:
    """A step that the ranks have not finished."""

    left_s: float
    """When it left its latest stage; before the first, when it was sent."""
    compute_s: float = 0.0
    """Seconds that the stages it has left computed."""
    waited_s: float = 0.0
    """Seconds between stages, while the next stage still ran the step before."""
    ended_s: float = math.inf
    """In ``RankProcesses.listened_s``."""


@dataclass(slots=True)
class _UnfinishedCopy:
    """A copy that the ranks have not finished."""

    sent_s: float
    """In ``RankProcesses.listened_s``. Infinite if it may take any time."""
    behind: _UnfinishedStep | None
    """The latest unfinished step when it was sent: a rank on a CPU makes the copy after that."""
    num_waiting: int
    """Ranks that have not made their part."""
    seconds: float = 0.0
    """Duration on the slowest rank so far."""
    error: str | None = None

    @property
    def since_s(self) -> float:
        """When every rank could begin; infinite as long as one may be unable to."""
        return self.sent_s if self.behind is None else max(self.sent_s, self.behind.ended_s)
