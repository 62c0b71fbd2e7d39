"""Items of stored responses, which later requests refer to by their ids.

The id of an item has that of its response in it, so no index of items takes memory.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from fastserve_gateway.errors import invalid
from fastserve_gateway.held_bodies import Take
from fastserve_gateway.response_store import GONE, ResponseStore

_RESPONSE_PREFIX = "resp_"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")
_MAX_SHOWN_CHARS = 64


def new_response_id() -> str:
    return f"{_RESPONSE_PREFIX}{uuid.uuid4().hex}"


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of the item at ``index`` of a response's output."""
    return f"{prefix}_{response_id.removeprefix(_RESPONSE_PREFIX)}_{index}"


class StoredItems:
    """The items of one tenant's responses that one request refers to.

    Args:
        take: takes room for each response that is read.
    """

    def __init__(self, store: ResponseStore, tenant: str | None, take: Take) -> None:
        self._store = store
        self._tenant = tenant
        self._take = take
        self._found: dict[str, Mapping[str, Any]] = {}
        self._read_ids: set[str] = set()

    def find(self, wanted: str, path: str) -> Mapping[str, Any]:
        """The item with an id.

        Args:
            path: of the reference in the request.

        Raises ApiError: it is not there (400), or there is no room for it (429).
        """
        parsed = _ITEM_ID.fullmatch(wanted)
        if parsed is not None:
            self._read(_RESPONSE_PREFIX + parsed[1])
        if wanted not in self._found:
            shown = repr(wanted[:_MAX_SHOWN_CHARS])
            raise invalid(path, f"got id {shown}; no such item; {GONE}. Send the item itself")
        return self._found[wanted]

    def _read(self, response_id: str) -> None:
        if response_id in self._read_ids:
            return
        self._read_ids.add(response_id)
        stored = self._store.get(self._tenant, response_id)
        if stored is not None:
            response = stored.response
            self._take(stored.num_response_bytes)
            self._found |= {item["id"]: item for item in response["output"]}
