"""Listening on an address of this machine; of the gateway and of the server's launcher."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

PORTS = range(1 << 16)
"""0 stands for any free one. The system would take others modulo the length of this."""

# Connections that wait to be accepted.
_BACKLOG = 1024


class HostError(Exception):
    """What was asked for is no address of this machine. The message is one line for a person."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(
            f"host: got {host!r}; {reason}; choose an address or a name of this machine with --host"
        )


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def numeric_address(host: str) -> str:
    """The address that a name stands for, IPv4 before IPv6. Raises HostError: none."""
    found = _addresses(host, None)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Args:
        port: one of ``PORTS``.

    Raises:
        HostError: there is no such host, or it is not this machine.
        OSError: the port cannot be had; mostly it is busy.
    """
    family, kind, _, _, address = _addresses(host, port)[0]
    listener = socket.socket(family, kind)
    try:
        # Connections of an earlier server in TIME_WAIT do not count as busy.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise HostError(host, "this machine has no such address") from None
        raise
    return listener


def _addresses(host: str, port: int | None) -> list[tuple[Any, ...]]:
    try:
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except socket.gaierror as error:
        raise HostError(host, str(error.strerror)) from None
    except UnicodeError as error:  # a name with an empty or a long part
        raise HostError(host, str(error)) from None
