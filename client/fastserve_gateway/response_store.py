"""Responses that later requests may continue, in memory and within a limit."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: Mapping[str, Any]
    """As it was sent."""
    messages: Sequence[Mapping[str, Any]]
    """The conversation up to and with the response, without instructions: they go with one request
    only."""
    session_id: str | None
    """The session of the conversation."""
    num_bytes: int
    """As JSON."""


class ResponseStore:
    """Keeps the responses that were used last. No tenant finds another tenant's.

    A tenant is that of a key, or None if there are no keys.

    Args:
        max_bytes: of the JSON of all responses together. 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()
        """By tenant and id. JSON takes a fraction of the memory of the values."""

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def put(
        self,
        tenant: str | None,
        response: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        session_id: str | None,
    ) -> bool:
        """Returns whether it keeps the response, which may be larger than the whole store."""
        values = [response, messages, session_id]
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > self._max_bytes:
            return False
        self._num_bytes += len(text)
        self._stored[tenant, response["id"]] = text
        while self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= len(oldest)
        return True

    def get(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """``None``: it is not there, or is another tenant's."""
        text = self._stored.get((tenant, response_id))
        if text is None:
            return None
        self._stored.move_to_end((tenant, response_id))
        response, messages, session_id = json.loads(text)
        return StoredResponse(response, messages, session_id, len(text))

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Returns whether it was there."""
        text = self._stored.pop((tenant, response_id), b"")
        self._num_bytes -= len(text)
        return bool(text)
