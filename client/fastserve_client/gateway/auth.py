"""API keys: where they come from, and whether a request has one."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from fastserve_client.errors import InvalidRequest
from fastserve_client.gateway.errors import ApiError


class ApiKeys:
    """The keys that the gateway accepts; with none of them, every request is allowed.

    Only digests are kept. They have equal lengths, and each request is compared with all of them
    in constant time, so that the time of an answer says nothing about a key.
    """

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def required(self) -> bool:
        """Whether there is any."""
        return bool(self._digests)

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """One key a line; empty lines do not count.

        Raises:
            InvalidRequest: the file cannot be read or has no key.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise InvalidRequest(f"api-keys-file: got {str(path)!r}; {reason}") from None
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise InvalidRequest(f"api-keys-file: got {str(path)!r}; it has no key, one a line")
        return cls(keys)

    def check(self, authorization: str | None) -> None:
        """Raises ApiError (401) unless the header ``Authorization`` holds one of the keys."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # as ASGI servers decode headers
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "a valid API key is required, as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
