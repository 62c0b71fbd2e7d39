"""Who may use the gateway: clients with an API key, or, without keys, this machine alone."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_client.key_file import NamedKey
from fastserve_client.listening import is_loopback

from fastserve_gateway.errors import ApiError

_HOST = re.compile(
    r"(\[(?P<address>[\da-f:.]+)\]|(?P<name>[\w.-]+))(:\d*)?", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    tenant: str | None
    """The name of its key. None: there are no keys, and the request itself may name its tenant."""
    most_urgent_priority: int | None
    """The least number that it may have as its priority; None: any."""


class ApiKeys:
    """The accepted keys. Without keys the gateway accepts requests to a name of this machine.

    Only digests are kept. They have equal lengths, and each request is compared with all of them in
    constant time. So the time of an answer reveals nothing about a key.

    Args:
        most_urgent_priority: for keys that have none of their own, and without keys for everybody.
            None: 0 with keys, and any priority without.
    """

    def __init__(
        self, keys: Sequence[NamedKey] = (), most_urgent_priority: int | None = None
    ) -> None:
        if keys and most_urgent_priority is None:
            most_urgent_priority = 0
        self._anybody = Caller(None, most_urgent_priority)
        self._digests = [_digest(one.key.encode()) for one in keys]
        self._callers = [
            Caller(
                one.name,
                most_urgent_priority
                if one.most_urgent_priority is None
                else one.most_urgent_priority,
            )
            for one in keys
        ]

    @property
    def required(self) -> bool:
        """Whether there are keys."""
        return bool(self._digests)

    @property
    def are_of_tenants(self) -> bool:
        """Whether several tenants have keys, who then share what the gateway has."""
        return len({caller.tenant for caller in self._callers}) > 1

    def check(self, authorization: str | None, x_api_key: str | None, host: str) -> Caller:
        """Returns who sends the request. Each key may come in either of two headers.

        Raises ApiError: 401: there are keys, and neither ``Authorization`` nor ``x-api-key`` has
        one of them. 403: there are no keys, and the header ``Host`` is no name of this machine.
        """
        if not self._digests:
            _check_host(host)
            return self._anybody
        scheme, _, bearer = (authorization or "").partition(" ")
        for key in (bearer if scheme.lower() == "bearer" else "", x_api_key or ""):
            given = _digest(key.strip().encode("latin-1"))  # ASGI servers decode headers so
            matches = [hmac.compare_digest(given, digest) for digest in self._digests]
            if any(matches):
                return self._callers[matches.index(True)]
        raise ApiError(
            401,
            "a valid API key is required, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _check_host(host: str) -> None:
    # A page of another site can make its own name lead to 127.0.0.1 (DNS rebinding). The browser
    # then takes the gateway for that site, and lets the page read the answers.
    parts = _HOST.fullmatch(host)
    name = (parts["address"] or parts["name"]).lower() if parts else ""
    if not is_loopback(name) and not name.endswith(".localhost"):
        raise ApiError(
            403,
            "without API keys the gateway answers to localhost and loopback addresses only, and "
            "the request's Host is another; use http://127.0.0.1, or start it with --api-keys-file",
            code="host_not_allowed",
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
