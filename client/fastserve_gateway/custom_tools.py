"""Tools of type ``custom``, which take text, as functions of one text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastserve_chat.written_calls import read_arguments

_INPUT = "input"
"""The only parameter of such a function."""


def custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function that stands for a tool with a ``name``, a ``description`` and a ``format``.

    Calls follow a format that is a regular expression. The model is told any other grammar, and
    nothing enforces it: no grammar of JSON has another grammar inside its strings.
    """
    function: dict[str, Any] = {"name": tool.get("name")}
    text: dict[str, Any] = {"type": "string"}
    about = [tool["description"]] if isinstance(tool.get("description"), str) else []
    match _grammar(tool.get("format")):
        case {"syntax": "regex", "definition": str(pattern)}:
            text["pattern"] = f"^(?:{pattern})$"
            function["strict"] = True
        case {"syntax": str(syntax), "definition": str(definition)}:
            about.append(f"The input follows this grammar ({syntax}):\n{definition}")
    function["description"] = "\n\n".join(about)
    function["parameters"] = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return function


def is_format_kept(tool: Mapping[str, Any]) -> bool:
    """Whether calls of the tool follow its ``format``."""
    given = tool.get("format")
    if given is None or given == {"type": "text"}:
        return True
    match _grammar(given):
        case {"syntax": "regex", "definition": str()}:
            return True
    return False


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


def _grammar(given: Any) -> Any:
    """The syntax and the definition of a format that is a grammar; None: it is none. The Responses
    API has them in the format itself, and chat completions one level deeper."""
    match given:
        case {"type": "grammar", "grammar": dict(grammar)}:
            return grammar
        case {"type": "grammar"}:
            return given
    return None
