"""Summaries that take the place of a conversation, in the Responses API.

OpenAI's are encrypted. These are text behind a mark, so that those of another service are told
apart: nobody here can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MARK = "fastserve-summary:"
_BEFORE_SUMMARY = "This is a summary of the conversation so far:\n\n"

MAX_SUMMARY_TOKENS = 2048
"""A quarter of a small context, and more than summaries have."""
_REQUEST = (
    "Summarize the conversation so far for somebody who continues it and cannot read it. Say what "
    "the user wants, what was decided and done, which files, names and values matter, and what "
    "comes next. Write the summary alone."
)


def summary_item(item_id: str, summary: str) -> dict[str, Any]:
    """The item of a conversation's summary."""
    return {"id": item_id, "type": "compaction", "encrypted_content": _MARK + summary}


def summary_of(item: Mapping[str, Any]) -> str | None:
    """The summary of an item; None: another service has encrypted it."""
    text = item.get("encrypted_content")
    if not isinstance(text, str) or not text.startswith(_MARK):
        return None
    return text.removeprefix(_MARK)


def summary_message(summary: str) -> dict[str, Any]:
    """What the model gets in place of the conversation. Not the user's: a message of the user may
    follow, and many templates take no two in a row."""
    return {"role": "system", "content": _BEFORE_SUMMARY + summary}


def with_request(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A conversation that ends with the wish for a summary."""
    if messages and messages[-1]["role"] == "user":
        *before, last = messages
        return [*before, {**last, "content": f"{last['content']}\n\n{_REQUEST}"}]
    return [*messages, {"role": "user", "content": _REQUEST}]
