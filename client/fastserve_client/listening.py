"""Listening on an address of this machine; of the gateway and of the server's launcher."""

from __future__ import annotations

import ipaddress
import socket

PORTS = range(1 << 16)
"""0 stands for any free one. The system would take others modulo the length of this."""

# Connections that wait to be accepted.
_BACKLOG = 1024


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def numeric_address(host: str) -> str:
    """The address that a name stands for, IPv4 before IPv6. Raises socket.gaierror: none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Args:
        port: one of ``PORTS``.

    Raises:
        socket.gaierror: there is no such host.
        OSError: the address is not one of this machine, or the port is busy.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        # Connections of an earlier server in TIME_WAIT do not count as busy.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
