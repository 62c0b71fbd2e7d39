"""Items of stored responses are found by their ids, within a tenant."""

from __future__ import annotations

import pytest
from fastserve_gateway.errors import ApiError
from fastserve_gateway.response_store import ResponseStore
from fastserve_gateway.stored_items import StoredItems, item_id, new_response_id


def test_an_item_is_found_by_its_tenant_alone() -> None:
    store = ResponseStore(10_000, is_shared=True)
    response_id = new_response_id()
    items = [{"id": item_id(prefix, response_id, 0), "type": prefix} for prefix in ("rs", "msg")]
    store.put("ann", {"id": response_id, "output": items}, [], None)
    taken: list[int] = []
    found = StoredItems(store, "ann", taken.append)
    for item in items:
        assert found.find(item["id"], "input.0") == item
    assert len(taken) == 1  # the response is read once
    with pytest.raises(ApiError, match=r"^input\.3: got id 'msg_"):
        StoredItems(store, "bob", taken.append).find(items[1]["id"], "input.3")
    with pytest.raises(ApiError, match="no such item"):
        found.find(item_id("msg", response_id, 1), "input.0")
    assert len(taken) == 1  # an unknown id is no reason to read it again
    store.delete("ann", response_id)
    with pytest.raises(ApiError, match="Send the item itself"):
        StoredItems(store, "ann", taken.append).find(items[0]["id"], "input.0")
