"""Limits on JSON that count its values, because a short text may hold very many."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

SMALL_BODY_BYTES = 1 << 14
"""A body up to this size becomes jobs in some 20 ms, whatever it holds."""
MAX_CONTAINERS = 1 << 16
"""Lists and objects of a body: those of some ten thousand messages. Each takes up to 240 bytes of
memory for a few in JSON, and time of the collector."""
MAX_MEMBERS = 1 << 17
"""Names with values, in all objects of a body. Half a million take a second to read."""
MAX_VALUES = 1 << 20
"""Values of a body, about: a prompt may be a million token ids. While they are read, the reader
holds the interpreter's lock for some 20 ms."""
MAX_FIELD_BYTES = 256 << 10
"""Of a field that may hold any JSON, such as a schema: above the server's own limits, and far above
what the context of most models has room for."""
NOT_FINITE = "all numbers must be finite"
# Pieces are counted one by one, so that other threads run between them.
_PIECE_BYTES = 1 << 16
_COUNTED = b'",:[{'
_NOT_COUNTED = bytes(set(range(256)) - set(_COUNTED))


def check_number_of_values(body: bytes | bytearray) -> None:
    """Raises ValueError: the body has too many values. It need not be valid JSON."""
    if len(body) <= SMALL_BODY_BYTES:
        return
    num_containers = num_members = num_values = 0
    is_in_text = False
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_COUNTED)
    for begin in range(0, len(marks), _PIECE_BYTES):
        parts = marks[begin : begin + _PIECE_BYTES].split(b'"')
        outside = b"".join(parts[is_in_text::2])
        is_in_text ^= len(parts) % 2 == 0
        commas, colons = outside.count(b","), outside.count(b":")
        num_containers += len(outside) - commas - colons
        num_members += colons
        num_values += len(outside) - colons
        if num_containers > MAX_CONTAINERS:
            raise ValueError(f"must have at most {MAX_CONTAINERS} lists and objects")
        if num_members > MAX_MEMBERS:
            raise ValueError(f"must have at most {MAX_MEMBERS} names with values")
        if num_values > MAX_VALUES:
            raise ValueError(f"must have at most {MAX_VALUES} values")


def check_field_size(value: Any) -> Any:
    """Returns the value of a field that may hold any JSON.

    Raises ValueError: it is larger than ``MAX_FIELD_BYTES``, too deep, or has infinite numbers.
    """
    if isinstance(value, dict | list):
        try:
            # Not json.dumps, which takes a piece of memory for each value.
            text = to_json(value, inf_nan_mode="constants")
        except ValueError:
            raise ValueError("must not be so deep") from None
        if len(text) > MAX_FIELD_BYTES:
            raise ValueError(f"got {len(text)} bytes; at most {MAX_FIELD_BYTES} are allowed")
        has_their_names = b"NaN" in text or b"Infinity" in text  # perhaps in a text
        if has_their_names and text != to_json(value, inf_nan_mode="null"):
            raise ValueError(NOT_FINITE)
    return value
