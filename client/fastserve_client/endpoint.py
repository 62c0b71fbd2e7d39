"""Where a server listens: parses the URLs that users type."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastserve_client.errors import InvalidRequest
from fastserve_client.protocol import DEFAULT_GRPC_PORT, DEFAULT_HOST, DEFAULT_HTTP_PORT

DEFAULT_URL = f"grpc://{DEFAULT_HOST}:{DEFAULT_GRPC_PORT}"
DEFAULT_HTTP_URL = f"http://{DEFAULT_HOST}:{DEFAULT_HTTP_PORT}"

# TLS means a proxy in front, which listens on the usual port.
_TLS_PORT = 443
_PORTS = {
    "grpc": DEFAULT_GRPC_PORT,
    "grpcs": _TLS_PORT,
    "http": DEFAULT_HTTP_PORT,
    "https": _TLS_PORT,
}
_HOST = re.compile(r"[\w.:%-]+", re.ASCII)
_USER = re.compile(r"^(\w+://)?.*@", re.DOTALL)
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_FOUR_NUMBERS = re.compile(r"\d+(\.\d+){3}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the endpoints of a tritonserver: gRPC or HTTP, with or without TLS."""

    scheme: str
    """``grpc``, ``grpcs``, ``http`` or ``https``."""
    host: str
    """Name or address; an IPv6 address without brackets."""
    port: int

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Accepts ``SCHEME://HOST[:PORT]`` and, as Triton's own tools write it, ``HOST[:PORT]``.

        The latter means gRPC. The default ports are Triton's, 8001 for gRPC and 8000 for HTTP, and
        443 with TLS.

        Raises:
            InvalidRequest: anything else; the message shows the expected form.
        """
        try:
            parts = urlsplit(url if "://" in url else f"grpc://{url}")
        except ValueError:
            raise _bad_url(url, "not a valid URL") from None
        if parts.scheme not in _PORTS:
            raise _bad_url(url, f"unknown scheme {parts.scheme!r}")
        if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
            raise _bad_url(url, "it holds more than a host and a port")
        try:
            port = parts.port
        except ValueError:
            raise _bad_url(url, "the port is not a number from 1 to 65535") from None
        if not parts.hostname or port == 0:
            raise _bad_url(url, "the host is missing" if port != 0 else "port 0 names no server")
        if _HOST.fullmatch(parts.hostname) is None:
            raise _bad_url(url, "a host has ASCII letters, digits and - . _ : % only")
        if _FOUR_NUMBERS.fullmatch(parts.hostname) and not _is_address(parts.hostname):
            raise _bad_url(url, "the numbers of an address are 0 to 255")
        return cls(parts.scheme, parts.hostname, _PORTS[parts.scheme] if port is None else port)

    @property
    def uses_http(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def uses_tls(self) -> bool:
        return self.scheme in ("grpcs", "https")

    @property
    def target(self) -> str:
        """``HOST:PORT``, the form that gRPC channels take."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}"


def without_keys(url: str) -> str:
    """A URL for messages and logs: a user, a query or a fragment may hold a password or a key."""
    return _QUERY.sub("?***", _USER.sub(r"\1***@", url))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _bad_url(url: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"url: got {without_keys(url)!r}; {reason}; "
        f"write it like {DEFAULT_URL} or {DEFAULT_HTTP_URL}"
    )
