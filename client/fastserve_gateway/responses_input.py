"""The input of the Responses API as messages of a conversation."""

from __future__ import annotations

from typing import Any

from fastserve_chat.call_messages import assistant_message, function_call, tool_message

from fastserve_gateway.chat_conversion import got_type, text_field
from fastserve_gateway.chat_message import MAX_MESSAGES
from fastserve_gateway.errors import invalid

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("user", "assistant", "system", "developer")


def input_messages(given: Any) -> list[dict[str, Any]]:
    """The messages of ``input``: text of the user, or items.

    Reasoning, a text and calls that follow one another are one message of the assistant.

    Raises ApiError: an item is wrong or not supported (400).
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid("input", "must be text or a list of items")
    if len(given) > MAX_MESSAGES:
        raise invalid("input", f"got {len(given)} items; at most {MAX_MESSAGES} are allowed")
    if not all(isinstance(item, dict) for item in given):
        raise invalid("input", "must be text or a list of items")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _add_item(messages, item, f"input.{index}")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], path: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
        text = _text(item.get("content"), f"{path}.content")
        if role != "assistant":
            role = "system" if role == "developer" else role
            messages.append({"role": role, "content": text})
        elif not _continues(messages) or messages[-1]["content"] or "tool_calls" in messages[-1]:
            messages.append(assistant_message(text))
        else:
            messages[-1]["content"] = text
    elif kind == "reasoning":
        # The summary is there for people; it stands in where the text is missing.
        parts = item.get("content") or item.get("summary") or ""
        field = "content" if item.get("content") else "summary"
        if reasoning := _text(parts, f"{path}.{field}"):
            messages.append(assistant_message("", reasoning))
    elif kind == "function_call":
        values = [text_field(item, name, path) for name in ("call_id", "name", "arguments")]
        if not _continues(messages):
            messages.append(assistant_message(""))
        messages[-1].setdefault("tool_calls", []).append(function_call(*values))
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{path}.output")
        messages.append(tool_message(text_field(item, "call_id", path), output))
    else:
        raise invalid(
            path,
            f"{got_type(item)}; not supported; there are message, function_call, "
            "function_call_output and reasoning",
        )


def _continues(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the assistant's, so that its turn may go on."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, "must be text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
            raise invalid(f"{path}.{index}", f"{got_type(part)}; not supported; must be text")
        texts.append(text)
    return "".join(texts)
