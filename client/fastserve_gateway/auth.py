"""Who may use the gateway: clients and operators with their keys, or, without keys, this machine
alone."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_client.errors import InvalidRequest
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
    sees_all: bool
    """Whether it may see the names, jobs and numbers of all tenants, or only its own."""
    is_operator: bool = False
    """An operator looks, and has no jobs."""

    def check_is_client(self) -> None:
        """Raises ApiError (403): it is an operator."""
        if self.is_operator:
            raise ApiError(
                403,
                "this key is an operator's, which is for /metrics and /live; "
                "use a key of --api-keys-file",
                code="operator_key",
            )

    def check_sees_all(self) -> None:
        """Raises ApiError (403): it sees only what is its own."""
        if not self.sees_all:
            raise ApiError(
                403,
                "this shows all tenants, so it needs an operator's key, which is one of "
                "--operator-keys-file",
                code="operator_key_required",
            )


class ApiKeys:
    """The accepted keys. Without keys the gateway accepts requests to a name of this machine.

    Only digests are kept. They have equal lengths, and each request is compared with all of them in
    constant time. So the time of an answer reveals nothing about a key.

    If any of ``keys`` has a name, each of them sees only what is its own tenant's.

    Args:
        most_urgent_priority: for keys that have none of their own, and without keys for everybody.
            None: 0 with keys, and any priority without.
        operator_keys: of callers that see everything and have no jobs. Their names mean nothing.

    Raises InvalidRequest: a key is in both lists, or there are only operators' keys.
    """

    def __init__(
        self,
        keys: Sequence[NamedKey] = (),
        most_urgent_priority: int | None = None,
        operator_keys: Sequence[NamedKey] = (),
    ) -> None:
        if keys and most_urgent_priority is None:
            most_urgent_priority = 0
        _check_operator_keys(keys, operator_keys)
        self.weights: dict[str | None, float] = {one.name: one.weight for one in keys}
        """Of tenants."""
        self._anybody = Caller(None, most_urgent_priority, sees_all=True)
        self._digests = [_digest(one.key.encode()) for one in (*keys, *operator_keys)]
        sees_all = not any(one.name for one in keys)
        self._callers = [
            Caller(
                one.name,
                most_urgent_priority
                if one.most_urgent_priority is None
                else one.most_urgent_priority,
                sees_all,
            )
            for one in keys
        ]
        operator = Caller(None, most_urgent_priority, sees_all=True, is_operator=True)
        self._callers += [operator] * len(operator_keys)

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


def _check_operator_keys(keys: Sequence[NamedKey], operator_keys: Sequence[NamedKey]) -> None:
    if operator_keys and not keys:
        raise InvalidRequest(
            "operator_keys_file: got it without api_keys_file; give both, because without API keys "
            "everybody on this machine may see and do everything"
        )
    if not {one.key for one in keys}.isdisjoint(one.key for one in operator_keys):
        raise InvalidRequest(
            "operator_keys_file: got a key that api_keys_file has too; take it out of one of them, "
            "as operators' keys are for looking alone"
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
