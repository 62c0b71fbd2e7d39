"""Several hosts: where their ranks meet, and who may join."""

from __future__ import annotations

import errno
import socket
import subprocess
import time
from collections.abc import Mapping

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastserve_backend.config import ParallelSection
from fastserve_backend.errors import ConfigError, EngineError
from fastserve_backend.executor.rank_processes import rank_environment
from fastserve_backend.rank_protocol.cluster_keys import ClusterKeys
from fastserve_backend.system.interpreter import python_executable

# A rank whose connection closed is found by the next message to it, and there is one so often, s.
PROBE_S = 1.0
# What the last messages to the ranks of other hosts may take, ms.
_LINGER_MS = 1000


class Cluster:
    """The first host's side, for the life of an engine; ranks may be restarted meanwhile.

    Owns the address where torch's agents and ranks meet (``master_port``), the agent that answers
    there, and the keys of the engine's own socket (the port after it).
    """

    def __init__(self, parallel: ParallelSection) -> None:
        """
        Raises:
            ConfigError: no usable secret, or the addresses cannot be listened on.
        """
        self.parallel = parallel
        self.num_local_ranks = parallel.num_ranks // parallel.nnodes
        self._keys = ClusterKeys.from_environment()
        try:
            self._address = socket.gethostbyname(parallel.master_addr)
            # Held here, not by the agent, so that a taken port shows at once.
            self._listener = socket.create_server((self._address, parallel.master_port))
        except OSError as error:
            raise _unusable(parallel, parallel.master_port, error) from None
        self._agent: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, parallel: ParallelSection) -> Cluster | None:
        """None where one host is all there is. Raises what the constructor does."""
        return cls(parallel) if parallel.nnodes > 1 else None

    @property
    def engine_address(self) -> str:
        return f"tcp://{self._address}:{self.parallel.engine_port}"

    @property
    def rank_variables(self) -> dict[str, str]:
        """Of torchrun's environment, for the ranks of this host."""
        return {
            "MASTER_ADDR": self.parallel.master_addr,
            "MASTER_PORT": str(self.parallel.master_port),
            "GROUP_RANK": "0",
        }

    def bind(self, engine_socket: zmq.Socket[bytes]) -> ThreadAuthenticator:
        """Open the engine's socket to ranks that have the secret, and to nobody else.

        Sending to a rank whose connection has closed then raises EHOSTUNREACH. The caller has to
        stop what is returned, before the socket's context ends.
        """
        authenticator = ThreadAuthenticator(engine_socket.context)
        authenticator.start()
        authenticator.configure_curve_callback("*", _OnlyRanks(self._keys.rank_public))
        self._keys.secure_engine(engine_socket)
        engine_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        engine_socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            engine_socket.bind(self.engine_address)
        except zmq.ZMQError as error:
            authenticator.stop()
            raise _unusable(self.parallel, self.parallel.engine_port, error) from None
        return authenticator

    def start_agent(self) -> None:
        """Unless it runs."""
        if self._agent is not None and self._agent.poll() is None:
            return
        self._stop_agent()
        command = [python_executable(), "-m", "fastserve_backend.worker.node_agent"]
        for option, value in (
            ("--listener", self._listener.fileno()),
            ("--nnodes", self.parallel.nnodes),
            ("--nproc-per-node", self.num_local_ranks),
            ("--master-addr", self.parallel.master_addr),
            ("--master-port", self.parallel.master_port),
        ):
            command += [option, str(value)]
        self._agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=rank_environment(),
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # Ctrl-C would end it before the engine has drained
        )

    def describe_missing(self, ranks: list[int]) -> str:
        """What to do about ranks that did not come."""
        nodes = sorted({rank // self.num_local_ranks for rank in ranks} - {0})
        if not nodes:
            return ""
        return f"; on host {', '.join(map(str, nodes))} run: " + self.parallel.torchrun_command(
            "I" if len(nodes) > 1 else nodes[0]
        )

    def close(self) -> None:
        """Idempotent."""
        self._stop_agent()
        self._listener.close()

    def _stop_agent(self) -> None:
        if self._agent is not None:
            assert self._agent.stdin is not None
            self._agent.stdin.close()  # ends its children
            self._agent.kill()
            self._agent.wait()
            self._agent = None


class LostRanks:
    """Finds ranks of other hosts whose connection has closed. No descriptor tells of a process
    there, but ZeroMQ refuses a message to one that is gone."""

    def __init__(
        self,
        engine_socket: zmq.Socket[bytes],
        identities: Mapping[int, bytes],
        num_local_ranks: int,
    ) -> None:
        """``identities`` are those of the ranks that have come, by their numbers; the first
        ``num_local_ranks`` are of this host."""
        self._socket = engine_socket
        self._identities = identities
        self._num_local_ranks = num_local_ranks
        self._next_probe_s = 0.0

    def check(self, *, at_once: bool) -> None:
        """Raises EngineError if one is lost; looks each ``PROBE_S``, or ``at_once``."""
        now = time.monotonic()
        if now < self._next_probe_s and not at_once:
            return
        self._next_probe_s = now + PROBE_S
        lost = self.find()
        if lost is not None:
            raise EngineError(lost)

    def find(self) -> str | None:
        """Says which rank is lost, if one is."""
        for rank, identity in self._identities.items():
            if rank < self._num_local_ranks:
                continue
            try:
                self._socket.send_multipart([identity, b""])
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                return connection_closed(rank)
        return None


def connection_closed(rank: int) -> str:
    return f"rank {rank} is gone: its connection closed"


class _OnlyRanks:
    """Decides for ZeroMQ's authenticator who may connect."""

    def __init__(self, rank_public: bytes) -> None:
        self._rank_public = rank_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._rank_public


def _unusable(parallel: ParallelSection, port: int, error: OSError | zmq.ZMQError) -> ConfigError:
    return ConfigError(
        f"parallel.master_addr, master_port: cannot listen on {parallel.master_addr}:{port}: "
        f"{error.strerror}; master_addr is an IPv4 address of this host (or its name), master_port "
        "and the port after it are free ones"
    )
