"""Messages of Anthropic's API as messages of a chat completion."""

from __future__ import annotations

import json
from typing import Any

from fastserve_chat.call_messages import assistant_message, function_call, tool_message
from fastserve_chat.written_calls import read_arguments

from fastserve_gateway.chat_conversion import PARAGRAPH, text_field
from fastserve_gateway.errors import invalid
from fastserve_gateway.message_parts import (
    TEXT_TYPES,
    as_output,
    check_is_text,
    got_type,
    newest_message,
    placeholder,
    type_of,
)

_ROLES = ("user", "assistant", "system", "developer")
# Claude Code's first system block: it differs from request to request, and says nothing to a model.
_BILLING = "x-anthropic-billing-header:"


def conversation(given: list[Any], left_out: list[str]) -> list[dict[str, Any]]:
    """The messages of ``messages``. A tool's result is a message of its own.

    Args:
        left_out: gets the paths of what the model does not get.

    Raises ApiError: a message is wrong (400).
    """
    roles = [one.get("role") if isinstance(one, dict) else None for one in given]
    newest = newest_message(roles)
    reader = _BlockReader(left_out)
    messages: list[dict[str, Any]] = []
    for index, (message, role) in enumerate(zip(given, roles, strict=True)):
        path = f"messages.{index}"
        if role not in _ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
        path = f"{path}.content"
        blocks = _blocks(message.get("content"), path)
        if role == "assistant":
            messages.append(reader.assistant(blocks, path))
        else:
            messages += reader.others(role, blocks, path, is_new=index == newest)
    return messages


def system_text(given: Any, left_out: list[str]) -> str:
    """The text of ``system``, each of whose blocks is a paragraph.

    A line about billing is left out. Prompts that begin with it would have no cached beginning in
    common.

    Raises ApiError: it is no text and no list of blocks (400).
    """
    blocks = _blocks(given, "system")
    reader = _BlockReader(left_out)
    texts = []
    for index, block in enumerate(blocks):
        text = reader.text(block, f"system.{index}")
        if text.startswith(_BILLING):
            left_out.append(f"system.{index}")
            _, _, text = text.partition("\n")
        if text:
            texts.append(text)
    return PARAGRAPH.join(texts)


class _BlockReader:
    def __init__(self, left_out: list[str]) -> None:
        self._left_out = left_out

    def assistant(self, blocks: list[Any], path: str) -> dict[str, Any]:
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(blocks):
            place = f"{path}.{index}"
            kind = type_of(block)
            if kind == "thinking":
                thoughts.append(text_field(block, "thinking", place))
            elif kind == "tool_use":
                calls.append(_call(block, place))
            elif text := self.text(block, place):
                texts.append(text)
        return assistant_message(PARAGRAPH.join(texts), PARAGRAPH.join(thoughts), calls)

    def others(
        self, role: str, blocks: list[Any], path: str, *, is_new: bool
    ) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        texts: list[str] = []  # since the last result of a tool
        for index, block in enumerate(blocks):
            place = f"{path}.{index}"
            if type_of(block) != "tool_result":
                if is_new:
                    check_is_text(_readable(block), place)
                texts.append(self.text(block, place))
                continue
            if texts:
                messages.append({"role": role, "content": PARAGRAPH.join(filter(None, texts))})
                texts = []
            output = self._joined(as_output(block.get("content")), f"{place}.content")
            messages.append(tool_message(text_field(block, "tool_use_id", place), output))
        if texts or not blocks:
            messages.append({"role": role, "content": PARAGRAPH.join(filter(None, texts))})
        return messages

    def text(self, block: Any, path: str) -> str:
        """The text that the model gets for a block, which may be empty."""
        block = _readable(block)
        kind = type_of(block)
        if kind is None:
            raise invalid(path, f"{got_type(block)}; must be a block with a type")
        if kind in TEXT_TYPES:
            return text_field(block, "text", path)
        if kind == "tool_reference":  # what a search for tools found; all tools are there anyway
            return f"Tool: {text_field(block, 'tool_name', path)}"
        self._left_out.append(path)
        return placeholder(block)

    def _joined(self, content: Any, path: str) -> str:
        blocks = enumerate(_blocks(content, path))
        texts = [self.text(block, f"{path}.{index}") for index, block in blocks]
        return PARAGRAPH.join(filter(None, texts))


def _readable(block: Any) -> Any:
    """A document or a found passage of plain text as a block of text; other blocks as they are."""
    match block:
        case {"type": "document", "source": {"type": "content", "content": content}} | {
            "type": "search_result",
            "content": content,
        }:
            return {"type": "text", "text": _passage(block, content)}
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return {"type": "text", "text": text}
    return block


def _passage(block: dict[str, Any], content: Any) -> str:
    """The title of a document, and the texts of its content."""
    blocks = content if isinstance(content, list) else [{"text": content}]
    texts = [block.get("title"), *(one.get("text") for one in blocks if isinstance(one, dict))]
    return PARAGRAPH.join(one for one in texts if isinstance(one, str) and one)


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    given = block.get("input")
    if given in (None, ""):
        given = {}
    if isinstance(given, str):  # other APIs have JSON in a text
        given = read_arguments(given)
    if not isinstance(given, dict):
        raise invalid(f"{path}.input", "must be an object")
    name, arguments = text_field(block, "name", path), json.dumps(given, ensure_ascii=False)
    return function_call(text_field(block, "id", path), name, arguments)


def _blocks(content: Any, path: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(path, "must be text or a list of blocks")
    return content
