"""JSON of large values, written in pieces.

The encoder of the standard library holds the interpreter's lock until its end. Between pieces other
threads run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# The log-probabilities of one token are so deep in a chat's answer: answer, choices, choice,
# log-probabilities, content. They are one piece.
_DEPTH = 5


def json_pieces(value: Any, *, ensure_ascii: bool = False, depth: int = _DEPTH) -> Iterator[str]:
    """The text of ``value`` without spaces. Raises ValueError: a number is not finite."""
    if not depth or not value or not isinstance(value, (dict, list, tuple)):
        yield json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"))
        return
    is_object = isinstance(value, dict)
    before = "{" if is_object else "["
    for one in value:
        yield before
        if is_object:
            yield f"{json.dumps(one, ensure_ascii=ensure_ascii)}:"
            one = value[one]
        yield from json_pieces(one, ensure_ascii=ensure_ascii, depth=depth - 1)
        before = ","
    yield "}" if is_object else "]"
