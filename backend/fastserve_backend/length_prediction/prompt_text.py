"""What the predictor gets of a prompt: the user's words, not the chat template's, and not all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Of each end. The encoder reads a dozen tokens of the beginning and a few of the end; that is far
# more, and still little for the socket, which holds some dozens of questions.
MAX_CHARS = 300
# Of each end of a prompt that came as tokens; most are several characters.
MAX_TOKENS = 100


def last_user_words(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Of a conversation: what the answer will be to; None where the user said nothing."""
    for message in reversed(messages):
        if message["role"] == "user":
            return str(message["content"])
    return None


def cut(text: str) -> str:
    """Both ends of a long text, as UTF-8 can carry it."""
    if len(text) > 2 * MAX_CHARS:
        text = f"{text[:MAX_CHARS]} {text[-MAX_CHARS:]}"
    return text.encode("utf-8", "replace").decode("utf-8")


def cut_tokens(token_ids: Sequence[int]) -> list[int]:
    """The same of tokens."""
    if len(token_ids) > 2 * MAX_TOKENS:
        return [*token_ids[:MAX_TOKENS], *token_ids[-MAX_TOKENS:]]
    return list(token_ids)
