"""Messages of any size over a stream socket, without ever waiting for the other end."""

from __future__ import annotations

import select
import socket

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18


class Packets:
    """One end. What the socket does not take at once is kept, and sent when it does.

    Args:
        end: of a pair of stream sockets; owned from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def events(self) -> int:
        """What to poll for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, data: bytes) -> None:
        """Raises OSError: the other end is closed."""
        self._unsent += len(data).to_bytes(_LENGTH_BYTES, "little") + data
        self.flush()

    def flush(self) -> None:
        """Raises OSError: the other end is closed."""
        try:
            while self._unsent:
                # No signal: in an embedded interpreter that might be deadly.
                sent = self._end.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass

    def receive(self) -> list[bytes]:
        """Messages that have come whole.

        Raises:
            OSError: the other end is closed.
        """
        try:
            while True:
                data = self._end.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the other end is closed")
                self._received += data
                if len(data) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        messages = []
        begin = 0
        while len(self._received) >= begin + _LENGTH_BYTES:
            start = begin + _LENGTH_BYTES
            end = start + int.from_bytes(self._received[begin:start], "little")
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[start:end]))
            begin = end
        del self._received[:begin]
        return messages

    def close(self) -> None:
        self._end.close()
