"""The fields of a chat request that are about tools."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastserve_client.schema_formats import has_unknown_format, schema_parts
from pydantic import AfterValidator, Field, PlainValidator

from fastserve_gateway.strict_fields import StrictFields

NOT_FINITE = "all numbers must be finite"
MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_TOOLS_BYTES = 256 << 10
"""Far above what the context of most models has room for."""
_CHOICES = ("auto", "none", "required")
_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
_MAX_SHOWN_CHARS = 40
_JSON_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))


def _shown(value: Any) -> str:
    return repr(value[:_MAX_SHOWN_CHARS]) if isinstance(value, str) else type(value).__name__


def _check_type(value: Any) -> Any:
    if value != "function":
        raise ValueError(f"got {_shown(value)}; only tools of type 'function' are supported")
    return value


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Most tools' arguments follow no grammar, so that nobody else would find what is no schema."""
    if schema.get("type", "object") != "object":
        raise ValueError(f"type: got {_shown(schema['type'])}; must be 'object'")
    try:
        for path, part in schema_parts(schema):
            _check_part(path, part)
    except RecursionError:
        raise ValueError("must not be so deep") from None
    return schema


def _check_part(path: str, part: dict[str, Any]) -> None:
    kind = part.get("type", [])
    for one in kind if isinstance(kind, list) else [kind]:
        if not isinstance(one, str) or one not in _JSON_TYPES:
            raise ValueError(f"{path}type: got {_shown(one)}; must be one of JSON's types")
    properties = part.get("properties", {})
    if not isinstance(properties, dict):
        raise ValueError(f"{path}properties: must be an object")
    for name, value in properties.items():
        if not isinstance(value, dict | bool):
            raise ValueError(f"{path}properties.{name}: must be a schema")
    required = part.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise ValueError(f"{path}required: must be a list of texts")


class FunctionDefinition(StrictFields):
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] | None = None
    """A JSON schema of an object; None: the function has no parameters."""
    strict: bool | None = None


class FunctionTool(StrictFields):
    type: Annotated[str, PlainValidator(_check_type)]
    function: FunctionDefinition


def _check_choice(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in _CHOICES):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return value
    given = value.get("type") if isinstance(value, dict) else value
    raise ValueError(
        f"got {_shown(given)}; must be one of {', '.join(_CHOICES)} and "
        '{"type": "function", "function": {"name": …}}'
    )


ToolChoice = Annotated[str | dict[str, Any] | None, PlainValidator(_check_choice)]


def unknown_tool_fields(tools: list[FunctionTool]) -> list[str]:
    """Fields that nothing reads, and formats of strict schemas that the server leaves out."""
    names = []
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        names += [f"{path}.{name}" for name in tool.unknown_fields()]
        names += [f"{path}.function.{name}" for name in tool.function.unknown_fields()]
        if tool.function.strict:
            parts = schema_parts(tool.function.parameters, f"{path}.function.parameters.")
            names += [f"{part}format" for part, schema in parts if has_unknown_format(schema)]
    return names


def check_tools(tools: list[FunctionTool], choice: str | dict[str, Any] | None) -> None:
    """Raises ValueError, with the field's name before a colon."""
    dumped = [tool.model_dump(exclude_unset=True) for tool in tools]
    try:
        num_bytes = len(json.dumps(dumped, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        raise ValueError(f"tools: {NOT_FINITE}") from None
    if num_bytes > MAX_TOOLS_BYTES:
        raise ValueError(f"tools: got {num_bytes} bytes; at most {MAX_TOOLS_BYTES} are allowed")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise ValueError(f"tools.{index}.function.name: another tool has the same name")
        names.add(tool.function.name)
    if choice is not None and choice != "none" and not tools:
        raise ValueError("tool_choice: only allowed with tools")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise ValueError("tool_choice.function.name: must be the name of one of the tools")
