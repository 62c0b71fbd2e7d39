"""Responses that later requests may continue, in memory and within limits."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_gateway.shares import Shares


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
    """Keeps the responses that each tenant has used last. No tenant finds another tenant's, and
    none makes room by another tenant's.

    A tenant is that of a key, or None if there are no keys.

    Args:
        max_bytes: of the JSON of all responses together. 0 keeps none.
        is_shared, weights: among several tenants; see ``Shares``.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        is_shared: bool,
        weights: Mapping[str | None, float] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._shares = Shares(max_bytes, are_divided=is_shared, weights=weights)
        self._stored: dict[str | None, OrderedDict[str, bytes]] = {}
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
        """Returns whether it keeps the response, which may be larger than the tenant's share."""
        values = [response, messages, session_id]
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > self._shares.most(tenant):
            return False
        while not self._shares.allows(tenant, len(text)):
            self.delete(tenant, next(iter(self._stored[tenant])))
        self._shares.add(tenant, len(text))
        self._stored.setdefault(tenant, OrderedDict())[response["id"]] = text
        return True

    def get(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """``None``: it is not there, or is another tenant's."""
        own = self._stored.get(tenant, OrderedDict())
        text = own.get(response_id)
        if text is None:
            return None
        own.move_to_end(response_id)
        response, messages, session_id = json.loads(text)
        return StoredResponse(response, messages, session_id, len(text))

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Returns whether it was there."""
        own = self._stored.get(tenant, OrderedDict())
        text = own.pop(response_id, None)
        if text is None:
            return False
        self._shares.remove(tenant, len(text))
        if not own:
            del self._stored[tenant]
        return True
