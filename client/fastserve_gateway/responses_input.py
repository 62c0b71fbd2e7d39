"""The input of the Responses API as messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastserve_chat.call_messages import assistant_message, function_call, tool_message
from fastserve_chat.written_calls import NO_ARGUMENTS

from fastserve_gateway.chat_conversion import text_field
from fastserve_gateway.chat_message import MAX_MESSAGES
from fastserve_gateway.compaction import summary_message, summary_of
from fastserve_gateway.custom_tools import custom_arguments
from fastserve_gateway.errors import invalid
from fastserve_gateway.message_parts import (
    TEXT_TYPES,
    as_output,
    as_text,
    check_is_text,
    got_type,
    newest_message,
    placeholder,
    type_of,
)
from fastserve_gateway.responses_tools import function_name

_TEXTS = (*TEXT_TYPES, "reasoning_text", "summary_text")
_ROLES = ("user", "assistant", "system", "developer")
_REFERENCE = "item_reference"

FindItem = Callable[[str, str], Mapping[str, Any]]
"""Returns the stored item with an id, for the item at a path. Raises ApiError (400)."""


def has_references(given: Any) -> bool:
    """Whether items of ``input`` stand for stored ones."""
    return isinstance(given, list) and any(map(_is_reference, given))


def input_messages(
    given: Any, left_out: list[str], find_item: FindItem | None = None
) -> list[dict[str, Any]]:
    """The messages of ``input``: text of the user, or items.

    Reasoning, a text and calls that follow one another are one message of the assistant.

    Args:
        left_out: gets the paths of what the model does not get.
        find_item: None: stored items are not looked up, and count as empty messages.

    Raises ApiError: an item is wrong, or refers to an item that is not stored (400).
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid("input", "must be text or a list of items")
    if len(given) > MAX_MESSAGES:
        raise invalid("input", f"got {len(given)} items; at most {MAX_MESSAGES} are allowed")
    if not all(isinstance(item, dict) for item in given):
        raise invalid("input", "must be text or a list of items")
    reader = _ItemReader(left_out, newest_message([_role(item) for item in given]))
    for index, item in enumerate(given):
        path = f"input.{index}"
        if not _is_reference(item):
            reader.add(item, index, path)
        elif find_item is None:
            text_field(item, "id", path)
            reader.messages.append(assistant_message(""))
        else:
            reader.add(find_item(text_field(item, "id", path), path), index, path)
    return reader.messages


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    # The type may be left out: no other item has an id alone.
    return item.get("type", _REFERENCE if item.keys() == {"id"} else None) == _REFERENCE


def _role(item: Mapping[str, Any]) -> Any:
    """Whose words the item has."""
    kind = item.get("type", "message")
    if kind == "message":
        return item.get("role")
    is_output = isinstance(kind, str) and kind.endswith("_output")
    return "tool" if is_output else "assistant"


class _ItemReader:
    """Collects the messages of items.

    Args:
        newest: the place of the item that is the user's newest message.
    """

    def __init__(self, left_out: list[str], newest: int | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._left_out = left_out
        self._newest = newest

    def add(self, item: Mapping[str, Any], index: int, path: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, path, is_new=index == self._newest)
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                self._add_call(item, as_text(item.get("arguments")) or NO_ARGUMENTS, path)
            case "custom_tool_call":
                self._add_call(item, custom_arguments(as_text(item.get("input"))), path)
            case "function_call_output" | "custom_tool_call_output":
                output = self._text(as_output(item.get("output")), f"{path}.output")
                self.messages.append(tool_message(text_field(item, "call_id", path), output))
            case "compaction" | "compaction_summary":
                summary = summary_of(item)
                if summary is None:
                    self._left_out.append(f"{path}.encrypted_content")
                else:
                    self.messages.append(summary_message(summary))
            case str():  # of tools that the API's own servers run, for example
                self._left_out.append(path)
            case _:
                raise invalid(path, f"{got_type(item)}; must have a type or a role")

    def _add_message(self, item: Mapping[str, Any], path: str, *, is_new: bool) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
        content = item.get("content")
        if content is None and role == "assistant":
            content = ""
        text = self._text(content, f"{path}.content", is_new=is_new)
        if role != "assistant":
            role = "system" if role == "developer" else role
            self.messages.append({"role": role, "content": text})
        elif not self._continues() or self.messages[-1]["content"] or self._has_calls():
            self.messages.append(assistant_message(text))
        else:
            self.messages[-1]["content"] = text

    def _add_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        # The summary is there for people; it stands in where the text is missing.
        field = "content" if item.get("content") else "summary"
        if reasoning := self._text(item.get(field) or "", f"{path}.{field}"):
            self.messages.append(assistant_message("", reasoning))
        elif item.get("encrypted_content"):  # another service's
            self._left_out.append(f"{path}.encrypted_content")

    def _add_call(self, item: Mapping[str, Any], arguments: str, path: str) -> None:
        call_id, name = (text_field(item, field, path) for field in ("call_id", "name"))
        namespace = item.get("namespace")
        name = function_name(name, namespace if isinstance(namespace, str) else None)
        if not self._continues():
            self.messages.append(assistant_message(""))
        call = function_call(call_id, name, arguments)
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _continues(self) -> bool:
        """Whether the last message is the assistant's, so that its turn may go on."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _has_calls(self) -> bool:
        return "tool_calls" in self.messages[-1]

    def _text(self, content: Any, path: str, *, is_new: bool = False) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise invalid(path, "must be text or a list of parts")
        parts = enumerate(content)
        return "".join(self._part(part, f"{path}.{index}", is_new) for index, part in parts)

    def _part(self, part: Any, path: str, is_new: bool) -> str:
        kind = type_of(part)
        if kind is None:
            raise invalid(path, f"{got_type(part)}; must be a part with a type")
        if kind in (*_TEXTS, "refusal"):
            return text_field(part, "refusal" if kind == "refusal" else "text", path)
        if is_new:
            check_is_text(part, path)
        self._left_out.append(path)
        return placeholder(part)
