"""The sockets between a rank and the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import zmq

from fastserve_backend.rank_protocol.cluster_keys import ClusterKeys
from fastserve_backend.rank_protocol.messages import FromRank, ToRank, encoder, to_rank_decoder
from fastserve_backend.worker.engine_watch import end_with_connection, end_with_stdin

# How long a closed socket still tries to deliver its last message.
LINGER_MS = 1000
Send = Callable[[FromRank], None]


class EngineLink:
    """Connects a rank to the engine. The process ends when the engine is gone.

    Each sending thread has a socket of its own, named ``name-rank-token``. The token is this
    process's own. So the engine never mistakes late messages of an earlier process of the same
    rank for this one's.
    """

    def __init__(self, address: str, rank: int) -> None:
        """
        Args:
            address: ``ipc:`` if the engine started this process, ``tcp:`` across hosts.

        Raises:
            ConfigError: a ``tcp:`` address, but no usable secret.
        """
        self.stopped = threading.Event()
        """The main loop sets this when the engine says stop."""
        self._address = address
        self._suffix = f"-{rank}-{os.urandom(4).hex()}"
        self._context = zmq.Context()
        self._keys = None if address.startswith("ipc:") else ClusterKeys.from_environment()
        self.main = self._socket("rank")
        if self._keys is None:
            end_with_stdin()
        else:
            end_with_connection(self.main, address, self.stopped)
        self.main.connect(address)
        self._error: Exception | None = None
        self._failed = os.eventfd(0, os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self.main, zmq.POLLIN)
        self._poller.register(self._failed, zmq.POLLIN)

    def receive(self) -> ToRank:
        """The engine's next message.

        Raises:
            Exception: the error that another thread has given to `fail`.
        """
        while True:
            self._poller.poll()
            if self._error is not None:
                raise self._error
            if data := self.main.recv():  # empty: the engine checked that this rank is there
                message: ToRank = to_rank_decoder.decode(data)
                return message

    def fail(self, error: Exception) -> None:
        """Make `receive` raise ``error``, at once if it is waiting. Any thread may call this."""
        self._error = error
        os.eventfd_write(self._failed, 1)

    def open_sender(self, name: str) -> Send:
        """Open another socket and return its send function, for one thread alone."""
        socket = self._socket(name)
        socket.connect(self._address)
        return send_function(socket)

    def _socket(self, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, (name + self._suffix).encode())
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        # No limit on queued messages. A full socket would also stop reading the answers to its
        # pings, and its connection would count as lost. The engine bounds what can be queued.
        socket.set_hwm(0)
        if self._keys is not None:
            self._keys.secure_rank(socket)
        return socket


def send_function(socket: zmq.Socket[bytes]) -> Send:
    return lambda message: socket.send(encoder.encode(message))
