"""Messages of Anthropic's API as messages of a chat completion."""

from __future__ import annotations

import json
from typing import Any

from fastserve_chat.call_messages import assistant_message, function_call, tool_message

from fastserve_gateway.chat_conversion import PARAGRAPH, got_type, text_field
from fastserve_gateway.errors import invalid

_ROLES = ("user", "assistant", "system", "developer")
# What another service thought, and keeps to itself.
_UNREADABLE = "redacted_thinking"


def conversation(given: list[Any]) -> list[dict[str, Any]]:
    """The messages of ``messages``. A tool's result is a message of its own.

    Raises ApiError: a message is wrong, or has a block that is not supported (400).
    """
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        path = f"messages.{index}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
        blocks = _blocks(message.get("content"), f"{path}.content")
        if role == "assistant":
            messages.append(_assistant(blocks, f"{path}.content"))
        else:
            messages += _others(role, blocks, f"{path}.content")
    return messages


def joined_blocks(content: Any, path: str) -> str:
    """A text, or blocks of type text, each a paragraph."""
    blocks = _blocks(content, path)
    return PARAGRAPH.join(_text(one, f"{path}.{index}") for index, one in enumerate(blocks))


def _assistant(blocks: list[Any], path: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        place = f"{path}.{index}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(text_field(block, "thinking", place))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise invalid(f"{place}.input", "must be an object")
            arguments = json.dumps(block["input"], ensure_ascii=False)
            name = text_field(block, "name", place)
            calls.append(function_call(text_field(block, "id", place), name, arguments))
        elif kind != _UNREADABLE:
            texts.append(_text(block, place))
    return assistant_message(PARAGRAPH.join(texts), PARAGRAPH.join(thoughts), calls)


def _others(role: str, blocks: list[Any], path: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []  # since the last result of a tool
    for index, block in enumerate(blocks):
        place = f"{path}.{index}"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(_text(block, place))
            continue
        if texts:
            messages.append({"role": role, "content": PARAGRAPH.join(texts)})
            texts = []
        output = joined_blocks(block.get("content") or "", f"{place}.content")
        messages.append(tool_message(text_field(block, "tool_use_id", place), output))
    if texts or not blocks:
        messages.append({"role": role, "content": PARAGRAPH.join(texts)})
    return messages


def _blocks(content: Any, path: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(path, "must be text or a list of blocks")
    return content


def _text(block: Any, path: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise invalid(path, f"{got_type(block)}; not supported here; must be text")
    return text_field(block, "text", path)
