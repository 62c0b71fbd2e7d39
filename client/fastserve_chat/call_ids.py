"""Ids of calls, and the form in which some chat templates want them."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

_CHARS = string.ascii_letters + string.digits
_LENGTH = 24
# Of an id that a client sends.
_MAX_READ_CHARS = 256


def new_call_id(length: int | None) -> str:
    """A random id of so many letters and digits; None: an id as OpenAI's are."""
    text = "".join(random.choices(_CHARS, k=length or _LENGTH))
    return text if length else f"call_{text}"


def with_short_ids(messages: Sequence[Mapping[str, Any]], length: int) -> list[Mapping[str, Any]]:
    """The messages with ids of ``length`` letters and digits. Ids that had this form stay."""
    return [_with_short_ids(message, length) for message in messages]


def _with_short_ids(message: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"], length)
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short(call.get("id"), length)} for call in message["tool_calls"]
        ]
    return changed


def _short(call_id: object, length: int) -> str:
    letters = "".join(one for one in str(call_id)[-_MAX_READ_CHARS:] if one in _CHARS)
    return letters[-length:].rjust(length, "0")
