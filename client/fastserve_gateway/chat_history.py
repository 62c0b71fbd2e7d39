"""Messages of chat completions in one form, whatever form clients give them.

Clients send back what other services wrote: reasoning under several names, calls without arguments,
parts that no model of text reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastserve_chat.call_messages import function_call
from fastserve_chat.written_calls import NO_ARGUMENTS

from fastserve_gateway.custom_tools import custom_arguments
from fastserve_gateway.message_parts import (
    MAX_TYPE_CHARS,
    TEXT_TYPES,
    as_output,
    check_is_text,
    newest_message,
    placeholder,
    type_of,
)
from fastserve_gateway.strict_fields import check_number_of_fields

_REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_text")
"""Names of reasoning, the first of which templates know."""
_THOUGHTS = ("thinking", "reasoning")
"""Types of an assistant's parts."""


def check_newest(messages: Any) -> Any:
    """Returns the messages. Raises ApiError: the user's newest one has a part that is no text."""
    if not isinstance(messages, list):
        return messages
    roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
    newest = newest_message(roles)
    parts = None if newest is None else messages[newest].get("content")
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        check_is_text(part, f"messages.{newest}.content.{index}")
    return messages


def as_template_takes(message: Any) -> Any:
    """The message with the names and the content that chat templates know.

    Parts that are no text become a placeholder, and keep the name of what is left out. What has
    another form stays, to be refused.

    Raises ValueError: the message has too many fields.
    """
    check_number_of_fields(message)
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    if role == "user" and isinstance(content, str):  # as many are: no copy
        return message
    changed = dict(message)
    if role == "developer":
        changed["role"] = "system"
    if role == "tool":
        changed["content"] = content = as_output(content)
    if content == [] or (content is None and role == "assistant"):
        changed["content"] = ""
    if isinstance(content, list) and content:
        changed["content"] = [_text_part(part) for part in content]
    if role == "assistant":
        _rename_reasoning(changed, content)
        if isinstance(calls := changed.get("tool_calls"), list):
            changed["tool_calls"] = [_function_call(call) for call in calls]
    return changed


def _text_part(part: Any) -> Any:
    kind = type_of(part)
    if kind is None or kind == "text":
        return part
    if kind in TEXT_TYPES and isinstance(part.get("text"), str):
        return {**part, "type": "text"}
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind in _THOUGHTS:
        return {"type": "text", "text": ""}
    return {"type": "text", "text": placeholder(part), kind[:MAX_TYPE_CHARS]: True}


def _rename_reasoning(message: dict[str, Any], content: Any) -> None:
    names = [name for name in _REASONING if isinstance(message.get(name), str)]
    found = next((message[name] for name in names if message[name]), "") or _thoughts(content)
    found = found or _details(message.get("reasoning_details"))
    for name in names:
        del message[name]
    if found:
        message.pop("reasoning_details", None)
        message[_REASONING[0]] = found


def _thoughts(content: Any) -> str:
    """The texts of parts of reasoning, as Mistral's API has them."""
    texts: list[Any] = []
    for part in content if isinstance(content, list) else ():
        kind = type_of(part)
        if kind in _THOUGHTS:
            thought = part.get(kind) or part.get("text")
            inner = thought if isinstance(thought, list) else [{"text": thought}]
            texts += [one.get("text") for one in inner if isinstance(one, dict)]
    return "".join(one for one in texts if isinstance(one, str))


def _details(details: Any) -> str:
    """The texts of ``reasoning_details``, as OpenRouter's API has them."""
    entries = [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []
    texts = [one.get("text") or one.get("summary") for one in entries]
    return "".join(one for one in texts if isinstance(one, str))


def _function_call(call: Any) -> Any:
    """A call of a function, with arguments. That of a custom tool is one of its function."""
    match call:
        case {"id": str(call_id), "type": "custom", "custom": {"name": str(name), **custom}}:
            given = custom.get("input")
            return function_call(
                call_id, name, custom_arguments(given if isinstance(given, str) else "")
            )
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, Mapping) or function.get("arguments") not in (None, ""):
        return call
    return {**call, "function": {**function, "arguments": NO_ARGUMENTS}}
