"""Who may use the gateway: clients with an API key, or, without keys, this machine alone."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from fastserve_client.errors import InvalidRequest
from fastserve_client.listening import is_loopback

from fastserve_gateway.errors import ApiError

_HOST = re.compile(
    r"(\[(?P<address>[\da-f:.]+)\]|(?P<name>[\w.-]+))(:\d*)?", re.ASCII | re.IGNORECASE
)


class ApiKeys:
    """The accepted keys. Without keys the gateway accepts requests to a name of this machine.

    Only digests are kept. They have equal lengths, and each request is compared with all of them in
    constant time. So the time of an answer reveals nothing about a key.
    """

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def required(self) -> bool:
        """Whether there are keys."""
        return bool(self._digests)

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Reads one ASCII key a line. Empty lines do not count.

        Not every client can send other keys: OpenAI's own takes only ASCII for a header.

        Raises:
            InvalidRequest: the file cannot be read, has no key, or one that is not ASCII.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not ASCII"
            raise InvalidRequest(f"api-keys-file: got {str(path)!r}; {reason}") from None
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise InvalidRequest(f"api-keys-file: got {str(path)!r}; it has no key, one a line")
        for number, line in enumerate(lines, 1):
            if not line.isascii():
                raise InvalidRequest(
                    f"api-keys-file: got {str(path)!r}; its line {number} is not ASCII, as a key "
                    "must be for every client to send it"
                )
        return cls(keys)

    def check(self, authorization: str | None, host: str) -> None:
        """Raises ApiError.

        401: there are keys, and the header ``Authorization`` has none of them. 403: there are no
        keys, and the header ``Host`` is no name of this machine.
        """
        if not self._digests:
            _check_host(host)
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # ASGI servers decode headers so
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "a valid API key is required, as 'Authorization: Bearer KEY'",
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
