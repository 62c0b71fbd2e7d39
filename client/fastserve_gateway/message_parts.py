"""Parts of messages that are no text, which is all that the models read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastserve_gateway.errors import invalid

_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""What a part of each type is, in the APIs of OpenAI, Anthropic and vLLM."""
TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of parts that are text, on each API: clients send back what another one wrote."""
MAX_TYPE_CHARS = 32
"""Of a type's name in words about it."""


def type_of(item: Any) -> str | None:
    """The type of an item, a part or a tool; None: it has none."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else None


def as_text(value: Any) -> str:
    """The text, or the JSON of another value; nothing for null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_output(value: Any) -> str | list[Any]:
    """What a tool returned: a list of parts, or text."""
    is_parts = isinstance(value, list) and all(map(type_of, value))
    return value if is_parts else as_text(value)


def got_type(item: Any) -> str:
    """Which kind of item or part it is, for a message; what it has may be a prompt."""
    kind = type_of(item)
    return "got no type" if kind is None else f"got type {kind[:MAX_TYPE_CHARS]!r}"


def placeholder(part: Any) -> str:
    """The text in place of a part of the conversation's history that is left out; empty if the
    reader would miss nothing."""
    name = _medium(part)
    return "" if name is None else f"[{name} left out: this model reads only text]"


def check_is_text(part: Any, path: str) -> None:
    """Raises ApiError: the part is no text (400). For the newest message of the user: an answer
    that does not know it would be about something else."""
    if (name := _medium(part)) is not None:
        remedy = f"this model reads only text; leave the {name} out, or send what it says as text"
        raise invalid(path, f"{got_type(part)}; {remedy}")


def newest_message(roles: Sequence[Any]) -> int | None:
    """The place of the user's last message, unless it is answered.

    Args:
        roles: of all messages.
    """
    for index in reversed(range(len(roles))):
        if roles[index] in ("user", "assistant"):
            return index if roles[index] == "user" else None
    return None


def _medium(part: Any) -> str | None:
    """What the part is, such as an image; None: something else."""
    return _MEDIA.get(type_of(part) or "")
