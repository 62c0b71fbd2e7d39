"""The messages of a conversation, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from fastserve_client.message_text import NOT_TEXT, joined_text
from fastserve_client.options import Message
from pydantic import ConfigDict, Field, PlainValidator
from typing_extensions import TypedDict  # pydantic takes typing's only from Python 3.12 on

MAX_MESSAGES = 1 << 14
"""Of a conversation, and parts of a message: encoding them holds up the event loop, or a thread."""
MAX_CALLS = 128
"""Of one message: as many as there may be tools."""


def _check_content(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(f"got {len(value)} parts; at most {MAX_MESSAGES} are allowed")
    if joined_text(value) is None:
        raise ValueError(NOT_TEXT)
    return value


class ChatMessage(TypedDict):
    """A dictionary, because it takes a quarter of the memory of a pydantic object."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    role: str
    content: Annotated[str | list[dict[str, Any]], PlainValidator(_check_content)]
    """Text, or parts of type text."""
    name: NotRequired[str | None]
    tool_calls: NotRequired[
        Annotated[list[dict[str, Any]], Field(max_length=MAX_CALLS, fail_fast=True)] | None
    ]
    tool_call_id: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]


def for_template(message: ChatMessage) -> Message:
    """The message with a text as its content, and without fields that nothing here reads."""
    if len(message) == 2 and isinstance(message["content"], str):  # as most are: no copy
        return message
    kept: dict[str, Any] = {"role": message["role"], "content": joined_text(message["content"])}
    for key in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        if message.get(key):
            kept[key] = message[key]
    return kept
