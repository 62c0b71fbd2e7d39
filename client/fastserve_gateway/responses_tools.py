"""The tools of the Responses API as functions of a chat completion, and their calls back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from fastserve_gateway.chat_conversion import text_field
from fastserve_gateway.custom_tools import custom_function, is_format_kept
from fastserve_gateway.errors import invalid
from fastserve_gateway.message_parts import type_of
from fastserve_gateway.tool_fields import MAX_TOOL_NAME_CHARS

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
    a function of one text. Chat completions leave out tools that the API's own servers run.

    Args:
        given: the field ``tools``.

    Raises ApiError: a tool is wrong (400).
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.chat_tools: list[dict[str, Any]] = []
        """In the form of chat completions."""
        self.paths: list[str] = []
        """Where each of them is in the request."""
        self.left_out: list[str] = []
        """Paths of the parts of tools that nothing enforces."""
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
            return
        self.paths.append(path)
        if kind not in ("function", "custom"):
            self.chat_tools.append({"type": kind})
            return
        function = {name: value for name, value in tool.items() if name != "type"}
        if kind == "custom":
            function = custom_function(tool)
            if not is_format_kept(tool):
                self.left_out.append(f"{path}.format")
        if isinstance(name := tool.get("name"), str):
            function["name"] = function_name(name, namespace)
            self._by_name[function["name"]] = NamedTool(name, namespace, kind == "custom")
        self.chat_tools.append({"type": "function", "function": function})

    def _add_namespace(self, tool: Mapping[str, Any], path: str) -> None:
        name, tools = text_field(tool, "name", path), tool.get("tools")
        if not isinstance(tools, list):
            raise invalid(f"{path}.tools", "must be a list of tools")
        for index, one in enumerate(tools):
            self._add(one, f"{path}.tools.{index}", name)


def function_name(name: str, namespace: str | None) -> str:
    """The name of the function that stands for a tool, which has a limit."""
    if namespace is None:
        return name
    joined = f"{namespace.rstrip('_')}__{name}"
    if len(joined) <= MAX_TOOL_NAME_CHARS:
        return joined
    mark = sha256(joined.encode()).hexdigest()[:_HASH_CHARS]
    return f"{joined[: MAX_TOOL_NAME_CHARS - _HASH_CHARS - 1]}_{mark}"
