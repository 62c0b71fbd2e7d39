"""Checks a conversation's messages before a chat template gets them.

Templates differ in what they do with content that is not text. Most put Python's own spelling of it
into the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastserve_client.message_text import NOT_TEXT, joined_text

from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.errors import InvalidRequestError

FIELD = "messages"
# Keys that templates know beside role, content and tool_calls.
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")


def check_messages(messages: object) -> list[Message]:
    """The messages in the form that templates take: ``role`` and ``content`` are text.

    Text parts are joined, and other keys are kept. A name, a call's id and reasoning are text. An
    assistant's message with ``tool_calls`` needs no content. If a call's arguments are JSON text,
    as in OpenAI's API, they become the object that templates expect.

    Raises:
        InvalidRequestError: it names the message at fault, without quoting its content.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        allowed = "must be a list of at least one message"
        raise InvalidRequestError(FIELD, type(messages).__name__, allowed)
    return [_checked(f"{FIELD}[{index}]", message) for index, message in enumerate(messages)]


def _checked(name: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        allowed = "must be an object with role and content"
        raise InvalidRequestError(name, type(message).__name__, allowed)
    checked = dict(message)
    calls = checked.pop("tool_calls", None)
    if calls:  # templates test whether the key exists
        checked["tool_calls"] = _tool_calls(f"{name}.tool_calls", calls)
        if checked.get("role") == "assistant" and checked.get("content") is None:
            checked["content"] = ""
    for key in ("role", "content"):
        if key not in checked:
            keys = ", ".join(map(str, message)) or "no keys"
            raise InvalidRequestError(name, keys, "must have the keys role and content")
    content = checked["content"]
    joined = joined_text(content)
    checked["content"] = _text(f"{name}.content", content if joined is None else joined, NOT_TEXT)
    checked["role"] = _text(f"{name}.role", checked["role"], "must be a string")
    for key in _TEXTS:
        if checked.get(key) is not None:
            _text(f"{name}.{key}", checked[key], "must be a string")
    return checked


def _text(name: str, value: object, allowed: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(name, type(value).__name__, allowed)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(name, "a lone surrogate", "must be valid Unicode") from None
    return value


def _tool_calls(name: str, calls: object) -> list[Mapping[str, Any]]:
    if not isinstance(calls, list | tuple) or not all(isinstance(one, Mapping) for one in calls):
        raise InvalidRequestError(name, type(calls).__name__, "must be a list of objects")
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # a model may have written anything
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
