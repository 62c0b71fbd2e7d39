"""Parts of messages that are no text, which is all that the models read."""

from __future__ import annotations

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
_MAX_TYPE_CHARS = 32


def got_type(item: Any) -> str:
    """Which kind of item or part it is, for a message; what it has may be a prompt."""
    kind = item.get("type") if isinstance(item, dict) else None
    return f"got type {kind[:_MAX_TYPE_CHARS]!r}" if isinstance(kind, str) else "got no type"


def medium(part: Any) -> str | None:
    """What the part is, such as an image; None: something else."""
    kind = part.get("type") if isinstance(part, dict) else None
    return _MEDIA.get(kind) if isinstance(kind, str) else None


def placeholder(name: str) -> str:
    """The text in place of a part of the conversation's history.

    Args:
        name: what the part is.
    """
    return f"[{name} left out: this model reads only text]"


def check_is_text(part: Any, path: str) -> None:
    """Raises ApiError: the part is no text (400). For the newest message of the user: an answer
    that does not know it would be about something else."""
    if (name := medium(part)) is not None:
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
