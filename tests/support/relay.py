"""A TCP relay in front of a server, for faults that the server itself cannot be made to have."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

CERTIFICATE = Path(__file__).parent / "tls" / "certificate.pem"
"""A self-signed certificate for localhost and 127.0.0.1, which only tests trust."""
_KEY = CERTIFICATE.with_name("key.pem")


class Relay:
    """Listens on a port of 127.0.0.1 and passes all bytes on to ``host:port`` and back.

    Args:
        num_refused: the number of first connections to drop.
        delay_s: time before a connection is passed on; its client gets no answer before.
        latency_s: delay of all data in each direction.
        tls: the relay's clients speak TLS, and find ``CERTIFICATE``.
    """

    def __init__(
        self,
        target: str,
        *,
        num_refused: int = 0,
        delay_s: float = 0.0,
        latency_s: float = 0.0,
        tls: bool = False,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._num_refused = num_refused
        self._delay_s = delay_s
        self._latency_s = latency_s
        self._closed = threading.Event()
        self._context = _server_context() if tls else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.num_connections = 0
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                if self.num_connections <= self._num_refused:
                    connection.close()
                    continue
                threading.Thread(target=self._connect, args=(connection,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._closed.wait(self._delay_s)
        with suppress(OSError):  # a client that refuses the certificate
            if self._context is not None:
                client = self._context.wrap_socket(client, server_side=True)
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            threading.Thread(target=self._copy, args=(server, client), daemon=True).start()
            self._copy(client, server)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # closed by the other direction, or at the end
            while data := source.recv(65536):
                self._closed.wait(self._latency_s)
                sink.sendall(data)
            self._closed.wait(self._latency_s)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._closed.set()
        for one in self._sockets:
            one.close()


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, _KEY)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
