"""Values of a request in messages about it."""

from __future__ import annotations

from typing import Any

from fastserve_client.protocol import MAX_INT32

_MAX_KIND_CHARS = 32
_JSON_KINDS = {
    list: "a list",
    dict: "an object",
    str: "a text",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def shown_value(value: Any) -> str:
    """A field's value for a message, without anything that may be a prompt."""
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str):
        return f"type {kind[:_MAX_KIND_CHARS]!r}"
    if isinstance(value, bool):
        return str(value).lower()
    if type(value) is int and abs(value) <= MAX_INT32:
        return str(value)
    return _JSON_KINDS.get(type(value), "a value")
