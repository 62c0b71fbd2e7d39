"""The text of a message. OpenAI's API has two forms for it."""

from __future__ import annotations

from collections.abc import Mapping

NOT_TEXT = "must be text, or a list of parts of type text"


def joined_text(content: object) -> str | None:
    """A text as it is, or the texts of parts ``{"type": "text", "text": …}``, joined.

    Returns None for anything else, such as a part that is an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        return None
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            return None
        text = part.get("text")
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)
