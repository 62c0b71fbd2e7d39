"""Stored responses stay within the limit, and each tenant has its own."""

from __future__ import annotations

from typing import Any

from fastserve_gateway.response_store import ResponseStore

MESSAGES = [{"role": "user", "content": "Wie weit ist es nach Köln?"}]


def response(response_id: str, text: str = "") -> dict[str, Any]:
    return {"id": response_id, "text": text}


def test_a_response_comes_back() -> None:
    store = ResponseStore(1000, is_shared=False)
    store.put("ann", response("a", "weit"), MESSAGES, "s")
    found = store.get("ann", "a")
    assert found is not None
    assert found.response == response("a", "weit")
    assert found.conversation == (MESSAGES, "s")
    assert store.delete("ann", "a")
    assert store.get("ann", "a") is None
    assert not store.delete("ann", "a")


def test_another_tenant_finds_nothing() -> None:
    store = ResponseStore(1000, is_shared=False)
    store.put("ann", response("a"), MESSAGES, "s")
    for other in ("bob", "", None):
        assert store.get(other, "a") is None
        assert not store.delete(other, "a")
    assert store.get("ann", "a") is not None


def test_the_least_recently_used_makes_room() -> None:
    measure = ResponseStore(1000, is_shared=False)
    measure.put(None, response("a"), [], None)
    found = measure.get(None, "a")
    assert found is not None
    store = ResponseStore(3 * found.num_bytes, is_shared=False)
    for name in "abc":
        store.put(None, response(name), [], None)
    assert store.get(None, "a") is not None
    store.put(None, response("d"), [], None)
    assert [name for name in "abcd" if store.get(None, name)] == ["a", "c", "d"]
    store.delete(None, "c")
    store.put(None, response("e"), [], None)
    assert [name for name in "ade" if store.get(None, name)] == ["a", "d", "e"]


def test_a_tenant_makes_room_by_its_own_alone() -> None:
    store = ResponseStore(10_000, is_shared=True)
    assert store.put("ann", response("a"), MESSAGES, "s")
    for number in range(100):
        assert store.put("mallory", response(f"m{number}", "x" * 500), [], None)
    assert store.get("ann", "a") is not None
    kept = [number for number in range(100) if store.get("mallory", f"m{number}")]
    assert kept == list(range(100 - len(kept), 100))
    assert 7 <= len(kept) < 10  # half of what ann leaves
    assert not store.put("mallory", response("large", "x" * 5000), [], None)
    assert store.get("mallory", f"m{kept[0]}") is not None
    for number in range(9):  # what mallory leaves is ann's, though mallory goes on
        assert store.put("ann", response(f"a{number}", "x" * 500), [], None)
        assert store.put("mallory", response(f"n{number}"), [], None)
    assert store.get("ann", "a8") is not None


def test_what_is_larger_than_the_store_pushes_nothing_out() -> None:
    store = ResponseStore(200, is_shared=False)
    assert store.put(None, response("small"), [], None)
    assert not store.put(None, response("large", "x" * 300), [], None)
    assert store.get(None, "large") is None
    assert store.get(None, "small") is not None
    assert not ResponseStore(0, is_shared=False).is_on
