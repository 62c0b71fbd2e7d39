"""The tools of the Responses API as functions of a chat completion, and their calls back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from fastserve_chat.written_calls import read_arguments

from fastserve_gateway.chat_conversion import text_field
from fastserve_gateway.errors import invalid
from fastserve_gateway.message_parts import type_of
from fastserve_gateway.tool_fields import MAX_TOOL_NAME_CHARS, MAX_TOOLS

_INPUT = "input"
"""The only parameter of a function that stands for a tool with free text."""
_HASH_CHARS = 8


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool as calls name it in this API."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether its input is text, and not a JSON object."""


class ResponsesTools:
    """The tools of one request. A ``namespace`` becomes the functions in it, and a ``custom`` tool
    a function of one text. Tools that the API's own servers run are left out.

    Args:
        given: the field ``tools``.

    Raises ApiError: a tool is wrong (400).
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        """In the form of chat completions."""
        self.paths: list[str] = []
        """Where each of them is in the request."""
        self.left_out: list[str] = []
        """Paths of what the model does not get to know."""
        self._by_name: dict[str, NamedTool] = {}
        for index, tool in enumerate(given):
            self._add(tool, f"tools.{index}", None)

    def called(self, function: str) -> NamedTool:
        """The tool whose function the model calls."""
        return self._by_name.get(function) or NamedTool(function)

    def _add(self, tool: Any, path: str, namespace: str | None) -> None:
        kind = type_of(tool)
        if kind is None:
            raise invalid(f"{path}.type", "must be text")
        if kind == "namespace" and namespace is None:
            self._add_namespace(tool, path)
        elif kind not in ("function", "custom") or len(self.functions) == MAX_TOOLS:
            self.left_out.append(path)
        else:
            function = {name: value for name, value in tool.items() if name != "type"}
            if kind == "custom":
                function = self._custom(tool, path)
            if isinstance(name := tool.get("name"), str):
                function["name"] = function_name(name, namespace)
                self._by_name[function["name"]] = NamedTool(name, namespace, kind == "custom")
            self.functions.append({"type": "function", "function": function})
            self.paths.append(path)

    def _add_namespace(self, tool: Mapping[str, Any], path: str) -> None:
        name, tools = text_field(tool, "name", path), tool.get("tools")
        if not isinstance(tools, list):
            raise invalid(f"{path}.tools", "must be a list of tools")
        for index, one in enumerate(tools):
            self._add(one, f"{path}.tools.{index}", name)

    def _custom(self, tool: Mapping[str, Any], path: str) -> dict[str, Any]:
        function: dict[str, Any] = {"name": tool.get("name")}
        text: dict[str, Any] = {"type": "string"}
        about = [tool["description"]] if isinstance(tool.get("description"), str) else []
        match tool.get("format"):
            case {"type": "grammar", "syntax": "regex", "definition": str(pattern)}:
                text["pattern"] = f"^(?:{pattern})$"
                function["strict"] = True
            case {"type": "grammar", "syntax": syntax, "definition": str(definition)}:
                # No grammar of JSON has another grammar inside its strings.
                about.append(f"The input follows this grammar ({syntax}):\n{definition}")
                self.left_out.append(f"{path}.format")
            case None | {"type": "text"}:
                pass
            case _:
                self.left_out.append(f"{path}.format")
        function["description"] = "\n\n".join(about)
        function["parameters"] = {
            "type": "object",
            "properties": {_INPUT: text},
            "required": [_INPUT],
            "additionalProperties": False,
        }
        return function


def function_name(name: str, namespace: str | None) -> str:
    """The name of the function that stands for a tool, which has a limit."""
    if namespace is None:
        return name
    joined = f"{namespace.rstrip('_')}__{name}"
    if len(joined) <= MAX_TOOL_NAME_CHARS:
        return joined
    mark = sha256(joined.encode()).hexdigest()[:_HASH_CHARS]
    return f"{joined[: MAX_TOOL_NAME_CHARS - _HASH_CHARS - 1]}_{mark}"


def custom_arguments(text: str) -> str:
    """The arguments of the function for a call of a custom tool with this input."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool whose function got these arguments. It is empty if they are cut
    off, and JSON as it is if the model wrote something else than a text."""
    read = read_arguments(arguments)
    if read is None:
        return ""
    text = read.get(_INPUT)
    return text if isinstance(text, str) else arguments
