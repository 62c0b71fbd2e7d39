"""Ranks on several hosts: the address where they meet, and the keys that let them in."""

from __future__ import annotations

import errno
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import zmq

from fastserve_backend.config_sections import ParallelSection
from fastserve_backend.errors import ConfigError, EngineError
from fastserve_backend.executor.rank_processes import rank_environment
from fastserve_backend.rank_protocol.cluster_keys import ClusterKeys
from fastserve_backend.system.interpreter import python_executable

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

# Seconds between two messages to a rank of another host. Such a message fails if the rank is gone.
PROBE_S = 1.0
# Time that the last messages to the ranks of other hosts may take, in milliseconds.
_LINGER_MS = 1000


class Cluster:
    """The first host's part of a cluster. It lives as long as the engine, and outlives its ranks.

    Owns the address where torch's agents and ranks meet (``master_port``), the agent that answers
    there, and the keys of the engine's own socket, which is at the next port.
    """

    def __init__(self, parallel: ParallelSection) -> None:
        """
        Raises:
            ConfigError: there is no usable secret, or an address cannot be listened on.
        """
        self.parallel = parallel
        self.num_local_ranks = parallel.num_ranks // parallel.nnodes
        self._keys = ClusterKeys.from_environment()
        try:
            self._address = socket.gethostbyname(parallel.master_addr)
            # Opened here, not by the agent, so that a port in use is reported at once.
            self._listener = socket.create_server((self._address, parallel.master_port))
        except OSError as error:
            raise _unusable(parallel, parallel.master_port, error) from None
        self._agent: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, parallel: ParallelSection) -> Cluster | None:
        """None if there is only one host. Raises: as the constructor."""
        return cls(parallel) if parallel.nnodes > 1 else None

    @property
    def engine_address(self) -> str:
        return f"tcp://{self._address}:{self.parallel.engine_port}"

    @property
    def rank_variables(self) -> dict[str, str]:
        """Environment variables for the ranks of this host, as torchrun sets them."""
        return {
            "MASTER_ADDR": self.parallel.master_addr,
            "MASTER_PORT": str(self.parallel.master_port),
            "GROUP_RANK": "0",
        }

    def bind(self, engine_socket: zmq.Socket[bytes]) -> ThreadAuthenticator:
        """Open the engine's socket to ranks that have the secret, and to nobody else.

        From then on, sending to a rank whose connection has closed raises EHOSTUNREACH. The caller
        must stop the returned authenticator before it ends the socket's context.
        """
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio; one host needs neither

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
        """Start torch's agent, unless it runs."""
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
        """The commands that start missing ranks on other hosts, for an error message."""
        nodes = sorted({rank // self.num_local_ranks for rank in ranks} - {0})
        if not nodes:
            return ""
        return f"; on host {', '.join(map(str, nodes))} run: " + self.parallel.torchrun_command(
            "I" if len(nodes) > 1 else nodes[0]
        )

    def close(self) -> None:
        """End the agent and free the addresses; idempotent."""
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
    """Finds ranks of other hosts whose connection has closed.

    A process on another host has no descriptor here to watch. But ZeroMQ refuses a message to one
    that is gone.
    """

    def __init__(
        self,
        engine_socket: zmq.Socket[bytes],
        identities: Mapping[int, bytes],
        num_local_ranks: int,
    ) -> None:
        """
        Args:
            identities: socket identities of connected ranks, by rank; the caller goes on adding to
                it.
            num_local_ranks: ranks below this number run on this host, and are not probed.
        """
        self._socket = engine_socket
        self._identities = identities
        self._num_local_ranks = num_local_ranks
        self._next_probe_s = 0.0

    def check(self, *, at_once: bool) -> None:
        """Probe the ranks if ``PROBE_S`` have passed, or ``at_once``.

        Raises:
            EngineError: one is lost.
        """
        now = time.monotonic()
        if now < self._next_probe_s and not at_once:
            return
        self._next_probe_s = now + PROBE_S
        lost = self.find()
        if lost is not None:
            raise EngineError(lost)

    def find(self) -> str | None:
        """Describes the first lost rank; None if there is none."""
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
    """Tells ZeroMQ's authenticator which keys may connect."""

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
