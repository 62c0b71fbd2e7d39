"""Listening on an address of this machine, for the gateway and the server's launcher."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from fastserve_client.errors import ClientError

# The system would take other numbers modulo the length of this range.
_PORTS = range(1 << 16)
# How many connections may wait to be accepted.
_BACKLOG = 1024

# Seconds that the gateway keeps an idle connection. A proxy that reuses one while it is being
# closed loses a request. So proxies must let go first: nginx does after 60 s, Go and Traefik after
# 90, Caddy after 120.
DEFAULT_KEEP_ALIVE_S = 130


class ListenError(ClientError):
    """Not an address of this machine, or not a port. The message names the flag."""


class PortBusy(ListenError):
    """The port is taken, mostly because another process listens there."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def numeric_address(host: str) -> str:
    """The address of a name, IPv4 before IPv6. Raises ListenError if it has none."""
    found = _addresses(host, None)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])


def listen(host: str, port: int, flag: str = "port") -> socket.socket:
    """A socket that listens there.

    Args:
        port: 0 to 65535; 0 takes any free one.
        flag: the flag that changes the port, for messages.

    Raises:
        ListenError: there is no such host, it is not this machine, or no port has this number.
        PortBusy: the port is taken.
    """
    return _open(host, port, flag, listens=True)


def reserve(host: str, port: int, flag: str = "port") -> socket.socket:
    """A socket that keeps a port without listening. Arguments and errors are those of ``listen``.

    Linux gives the port to nobody who asks for any free one. A server that asks for its number, and
    sets SO_REUSEADDR as nearly all do, can listen there meanwhile.
    """
    return _open(host, port, flag, listens=False)


def _open(host: str, port: int, flag: str, *, listens: bool) -> socket.socket:
    if port not in _PORTS:
        raise ListenError(f"{flag}: got {port}; must be 0 to {_PORTS[-1]}")
    family, kind, _, _, address = _addresses(host, port)[0]
    try:
        return _bound(family, kind, address, listens=listens)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise _no_such_host(host, "this machine has no such address") from None
        raise PortBusy(
            f"{flag}: cannot listen on {host}:{port} ({error.strerror}); "
            f"choose another one with --{flag}, or 0 for any free port"
        ) from None


def _bound(family: int, kind: int, address: Any, *, listens: bool) -> socket.socket:
    bound = socket.socket(family, kind)
    try:
        # Connections of an earlier server in TIME_WAIT do not count as busy.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if listens:
            bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _addresses(host: str, port: int | None) -> list[tuple[Any, ...]]:
    try:
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except socket.gaierror as error:
        raise _no_such_host(host, error.strerror) from None
    except UnicodeError as error:  # a name with an empty or a long part
        raise _no_such_host(host, error) from None


def _no_such_host(host: str, reason: object) -> ListenError:
    return ListenError(
        f"host: got {host!r}; {reason}; choose an address or a name of this machine with --host"
    )
