"""The sockets of a rank to the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import zmq

from fastserve_backend.rank_protocol.cluster_keys import ClusterKeys
from fastserve_backend.rank_protocol.messages import FromRank, ToRank, encoder, to_rank_decoder
from fastserve_backend.worker.engine_watch import end_with_connection, end_with_stdin

# A socket that is closed still delivers its last message, for so long.
LINGER_MS = 1000
Send = Callable[[FromRank], None]


class EngineLink:
    """Connects the threads of a rank, a socket each. The process ends when the engine is gone.

    A socket calls itself ``name-rank-token``; the token is this process's, so that the engine never
    takes what a former process of the same rank still sends for this one's.
    """

    def __init__(self, address: str, rank: int) -> None:
        """
        Args:
            address: ``ipc:`` where the engine started this process, ``tcp:`` among several hosts.

        Raises:
            ConfigError: there is no usable secret for a ``tcp:`` address.
        """
        self.stopped = threading.Event()
        """To be set when the engine says stop."""
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
            Exception: what another thread has reported to `fail`.
        """
        while True:
            self._poller.poll()
            if self._error is not None:
                raise self._error
            if data := self.main.recv():  # empty: the engine looked whether this rank is there
                message: ToRank = to_rank_decoder.decode(data)
                return message

    def fail(self, error: Exception) -> None:
        """Have `receive` raise ``error``, at once if it waits; from any thread."""
        self._error = error
        os.eventfd_write(self._failed, 1)

    def sender(self, name: str) -> Send:
        """For the thread that calls this."""
        socket = self._socket(name)
        socket.connect(self._address)
        return sender(socket)

    def _socket(self, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, (name + self._suffix).encode())
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        # A socket that takes no more while its thread is in a step reads no answer to its pings
        # either, so its connection would count as lost. What is queued is bounded as the engine's.
        socket.set_hwm(0)
        if self._keys is not None:
            self._keys.secure_rank(socket)
        return socket


def sender(socket: zmq.Socket[bytes]) -> Send:
    return lambda message: socket.send(encoder.encode(message))
