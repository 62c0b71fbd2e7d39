"""HTTP connections within limits: without a key, one must not cost the others."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections import deque

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from fastserve_gateway.connections import Connections
from fastserve_gateway.errors import ApiError

# Incomplete headers count too, because the parser joins a header's pieces in time that grows with
# their square.
MAX_HEADER_BYTES = 1 << 16
# How long a request's headers may take from their first byte, and the rest of a body that was
# answered before its end.
HEADERS_TIMEOUT_S = 30.0
# A client counts as gone if it reads nothing for this long while there is something to read.
UNREAD_TIMEOUT_S = 4.0
# So does a client that has this much unread, beside what uvicorn holds, and reads none of it for so
# long, because its answer goes on growing in the server.
_UNREAD_BYTES = 1 << 17  # the system's own buffers would hold megabytes
STALLED_TIMEOUT_S = 1.0
# Requests that wait for an answer. Clients send one at a time, and the parser cannot be paused.
MAX_UNANSWERED = 16


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection with these limits.

    uvicorn's own has none, and loses the body of a request that offers an upgrade to another
    protocol. (uvicorn with h11 limits headers and loses nothing. But there a body of small chunks
    holds up all clients for seconds.)
    """

    _num_unparsed_bytes = 0
    """Bytes since the last complete headers or part of a body."""
    _is_idle = True
    """No request is incomplete."""
    _stalled: asyncio.TimerHandle | None = None
    """Drops a client that has much to read, and reads none of it."""

    @property
    def _connections(self) -> Connections:
        found: Connections = self.app_state["connections"]
        return found

    def on_caller(self, tenant: str | None) -> None:
        """The request has a valid key of this tenant. Raises ApiError: see ``Connections``."""
        self._connections.on_request(self, tenant)

    def drop(self) -> None:
        self.transport.abort()

    def is_answering(self, path: str) -> bool:
        """Whether a request for this path has no whole answer yet."""
        return any(cycle.scope["path"] == path for cycle in self._unanswered)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.on_connect(self, self.client[0] if self.client else "")
        connection = transport.get_extra_info("socket")
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_TIMEOUT_S * 1000)
        )
        # Linux takes twice as much as it is told (socket(7)).
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES // 2)
        self._unanswered: deque[RequestResponseCycle] = deque()
        # Some clients connect before they have a request.
        self._deadline = self._close_in(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.on_end(self)
        self._deadline.cancel()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)
        # uvicorn itself tells only the latest request.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _expect_reading(self) -> None:
        """Waits for the client to read. Nothing is written meanwhile, so the unread part can only
        shrink."""
        before = self._num_unread_bytes()

        def drop_or_go_on() -> None:
            if self._num_unread_bytes() == before:
                self.transport.abort()
            else:
                self._expect_reading()

        self._stalled = self.loop.call_later(STALLED_TIMEOUT_S, drop_or_go_on)

    def _num_unread_bytes(self) -> int:
        connection = self.transport.get_extra_info("socket")
        unsent = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(unsent, sys.byteorder)

    def data_received(self, data: bytes) -> None:
        self._num_unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            reason = "Invalid HTTP request received."
            self.logger.warning(reason)
            self._refuse(400, reason)
        if self._num_unparsed_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._is_idle = False
        self._set_deadline()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # this method is called again for them, see below
        self._num_unparsed_bytes = 0
        self._deadline.cancel()
        lengths = (len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if len(self.url) + sum(lengths) > MAX_HEADER_BYTES:
            self._refuse_headers()
            raise ConnectionAbortedError  # makes the parser stop
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise ConnectionAbortedError
        super().on_headers_complete()
        # uvicorn pauses for a pipelined request, and would not notice that the client goes away.
        self.flow.resume_reading()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = 0
        super().on_body(body)
        # HeldBodies does not count these bytes yet. uvicorn has paused for them too.
        if len(self._unanswered) > 1 and len(self.cycle.body) > HIGH_WATER_LIMIT:
            raise ConnectionAbortedError

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_unparsed_bytes = 0
        self._is_idle = True
        super().on_message_complete()
        self._set_deadline()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # our deadline also holds for a half-received request
        self._set_deadline()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Ignores the offer of an upgrade, as a server may (RFC 9110, 7.8).

        The parser stops at such headers. So a new parser gets the headers without the offer, and
        then ``rest``, the bytes after them.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "CONNECT: the gateway is no proxy")
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._num_unparsed_bytes = 0
        self.data_received(b"\r\n".join((*lines, b"", rest)))

    def _set_deadline(self) -> None:
        """Sets the deadline for the next headers, or for the rest of a body, if no answer runs."""
        if not self._unanswered:
            self._deadline.cancel()
            seconds = self.timeout_keep_alive if self._is_idle else HEADERS_TIMEOUT_S
            self._deadline = self._close_in(seconds)

    def _close_in(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.close)

    def _refuse_headers(self) -> None:
        self._refuse(431, f"headers: longer than {MAX_HEADER_BYTES} bytes")

    def _refuse(self, status: int, reason: str) -> None:
        if self.transport.is_closing():
            return
        if self._unanswered:  # a refusal would land in the middle of an answer
            self.transport.abort()
            return
        response = ApiError(status, reason).response("")
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", response.body)))
        self.transport.close()
