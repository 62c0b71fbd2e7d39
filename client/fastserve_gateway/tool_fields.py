"""The fields of a chat request that are about tools."""

from __future__ import annotations

from typing import Annotated, Any

from fastserve_client.schema_formats import SchemaPlace, schema_parts
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from fastserve_gateway.json_size import check_field_size
from fastserve_gateway.strict_fields import MAX_NAME_CHARS, StrictFields, unknown_formats

MAX_TOOLS = 128
"""OpenAI's limit."""
_CHOICES = ("auto", "none", "required")
MAX_TOOL_NAME_CHARS = 128
_NAME = rf"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$"
"""Agents put the name of an MCP server before that of its tool."""
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
    for place, part in schema_parts(schema):
        _check_part(place, part)
    return schema


def _check_part(place: SchemaPlace | None, part: dict[str, Any]) -> None:
    kind = part.get("type", [])
    for one in kind if isinstance(kind, list) else [kind]:
        if not isinstance(one, str) or one not in _JSON_TYPES:
            raise _wrong(place, f"type: got {_shown(one)}; must be one of JSON's types")
    properties = part.get("properties", {})
    if not isinstance(properties, dict):
        raise _wrong(place, "properties: must be an object")
    for name, value in properties.items():
        if not isinstance(value, dict | bool):
            raise _wrong(place, f"properties.{name[:MAX_NAME_CHARS]}: must be a schema")
    required = part.get("required")
    if required is None:  # Go's libraries write null for an empty list
        return
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise _wrong(place, "required: must be a list of texts")


def _wrong(place: SchemaPlace | None, mistake: str) -> ValueError:
    return ValueError(mistake if place is None else f"{place.text()}.{mistake}")


class FunctionDefinition(StrictFields):
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] | None = None
    """A JSON schema of an object; None: the function has no parameters."""
    strict: bool | None = None


class FunctionTool(StrictFields):
    type: Annotated[str, PlainValidator(_check_type)]
    function: FunctionDefinition


def _check_tools_size(value: Any) -> Any:
    is_long = isinstance(value, list) and len(value) > MAX_TOOLS
    return value if is_long else check_field_size(value)


ToolsField = Annotated[
    list[FunctionTool],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(_check_tools_size),
]


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


ToolChoice = Annotated[
    str | dict[str, Any] | None, PlainValidator(_check_choice), AfterValidator(check_field_size)
]


def unknown_tool_fields(tools: list[FunctionTool]) -> list[str]:
    """Fields that nothing reads, and formats of strict schemas that the server leaves out."""
    names = []
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        names += [f"{path}.{name}" for name in tool.unknown_fields()]
        names += [f"{path}.function.{name}" for name in tool.function.unknown_fields()]
        if tool.function.strict:
            names += unknown_formats(tool.function.parameters, f"{path}.function.parameters")
    return names


def check_tools(tools: list[FunctionTool], choice: str | dict[str, Any] | None) -> None:
    """Raises ValueError, with the field's name before a colon."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise ValueError(f"tools.{index}.function.name: another tool has the same name")
        names.add(tool.function.name)
    if choice not in (None, "none", "auto") and not tools:
        raise ValueError("tool_choice: only allowed with tools")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise ValueError("tool_choice.function.name: must be the name of one of the tools")
