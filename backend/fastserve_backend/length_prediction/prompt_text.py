"""The part of a prompt that the predictor gets: the user's words, without the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Characters at each end of a prompt. The encoder reads a dozen tokens of the beginning and a few of
# the end. This is far more, and still little for a socket that holds dozens of questions.
MAX_CHARS = 300
# Tokens at each end of a prompt that arrived as tokens. Most have several characters.
MAX_TOKENS = 100


def last_user_words(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The user's last message, which the model will answer; None: the user said nothing."""
    for message in reversed(messages):
        if message["role"] == "user":
            return str(message["content"])
    return None


def cut(text: str) -> str:
    """Both ends of a long text; characters that UTF-8 cannot encode are replaced."""
    if len(text) > 2 * MAX_CHARS:
        text = f"{text[:MAX_CHARS]} {text[-MAX_CHARS:]}"
    return text.encode("utf-8", "replace").decode("utf-8")


def cut_tokens(token_ids: Sequence[int]) -> list[int]:
    """Both ends of a long list of tokens."""
    if len(token_ids) > 2 * MAX_TOKENS:
        return [*token_ids[:MAX_TOKENS], *token_ids[-MAX_TOKENS:]]
    return list(token_ids)
