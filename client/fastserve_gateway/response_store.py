"""Responses that later requests may continue, in memory and within limits."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_gateway.shares import Shares

GONE = "it was not stored, is deleted, or made room for others"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, which takes a fraction of the memory of its values."""

    response_json: bytes
    conversation_json: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response_json) + len(self.conversation_json)

    @property
    def num_response_bytes(self) -> int:
        return len(self.response_json)

    @property
    def response(self) -> dict[str, Any]:
        """As it was sent."""
        response: dict[str, Any] = json.loads(self.response_json)
        return response

    @property
    def conversation(self) -> tuple[list[dict[str, Any]], str | None]:
        """The messages up to and with the response, and their session. There are no instructions:
        they go with one request only."""
        messages, session_id = json.loads(self.conversation_json)
        return messages, session_id


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
        self._stored: dict[str | None, OrderedDict[str, StoredResponse]] = {}
        """By tenant and id."""

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
        stored = StoredResponse(_to_json(response), _to_json([messages, session_id]))
        if stored.num_bytes > self._shares.most(tenant):
            return False
        while not self._shares.allows(tenant, stored.num_bytes):
            self.delete(tenant, next(iter(self._stored[tenant])))
        self._shares.add(tenant, stored.num_bytes)
        self._stored.setdefault(tenant, OrderedDict())[response["id"]] = stored
        return True

    def get(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """``None``: it is not there, or is another tenant's."""
        own = self._stored.get(tenant, OrderedDict())
        stored = own.get(response_id)
        if stored is not None:
            own.move_to_end(response_id)
        return stored

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Returns whether it was there."""
        own = self._stored.get(tenant, OrderedDict())
        stored = own.pop(response_id, None)
        if stored is None:
            return False
        self._shares.remove(tenant, stored.num_bytes)
        if not own:
            del self._stored[tenant]
        return True


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
