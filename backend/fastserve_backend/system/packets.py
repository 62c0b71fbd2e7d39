"""Typed messages of any size over a stream socket. Neither end ever waits for the other."""

from __future__ import annotations

import select
import socket
from typing import Generic, TypeVar

import msgspec

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18
_encoder = msgspec.msgpack.Encoder()

_Received = TypeVar("_Received")


class Packets(Generic[_Received]):
    """One end of the connection, which talks MessagePack. It keeps what the socket does not take at
    once, and sends it when the socket has room again.

    Args:
        end: one of a pair of stream sockets. ``Packets`` owns it from now on.
        decoder: of the other end's messages.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[_Received]) -> None:
        end.setblocking(False)
        self._decoder = decoder
        self._end = end
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the socket has not taken yet. More than 0: the other end reads too slowly."""
        return len(self._unsent)

    @property
    def events(self) -> int:
        """The events to poll for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError: the other end is closed."""
        data = _encoder.encode(message)
        self._unsent += len(data).to_bytes(_LENGTH_BYTES, "little") + data
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as the socket has room.

        Raises:
            OSError: the other end is closed.
        """
        try:
            while self._unsent:
                # Without a signal, which could kill a program that embeds the interpreter.
                sent = self._end.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass

    def receive(self) -> list[_Received]:
        """The messages that are complete by now. More may be ready: poll again.

        Raises:
            OSError: the other end is closed, and all that it sent has been received.
            msgspec.MsgspecError: it sent something that is no message.
        """
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the other end is closed")
        self._received += data
        messages = []
        begin = 0
        while len(self._received) >= begin + _LENGTH_BYTES:
            start = begin + _LENGTH_BYTES
            end = start + int.from_bytes(self._received[begin:start], "little")
            if len(self._received) < end:
                break
            messages.append(self._decoder.decode(self._received[start:end]))
            begin = end
        del self._received[:begin]
        return messages

    def end_sending(self) -> None:
        """Tell the other end that nothing follows; drop what was not sent. Receiving goes on."""
        self._unsent.clear()
        self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()
