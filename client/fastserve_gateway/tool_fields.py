"""The fields of a chat request that are about tools."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from fastserve_client.schema_formats import SchemaPlace, schema_parts
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from fastserve_gateway.custom_tools import custom_function, is_format_kept
from fastserve_gateway.json_size import check_field_size
from fastserve_gateway.strict_fields import MAX_NAME_CHARS, StrictFields, unknown_keywords

MAX_TOOLS = 128
"""OpenAI's limit. The model does not get to know the tools behind so many."""
MAX_GIVEN_TOOLS = 1024
"""Of a request, with those that are left out."""
_FUNCTION, _CUSTOM = "function", "custom"
_SERVED = (_FUNCTION, _CUSTOM)
_WHY_LEFT_OUT = (
    "those that this server cannot call, such as a web search, and those behind the first "
    f"{MAX_TOOLS} are left out; give a function, or the choice auto"
)
_CHOICES = ("auto", "none", "required")
MAX_TOOL_NAME_CHARS = 128
_NAME = rf"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$"
"""Agents put the name of an MCP server before that of its tool."""
_MAX_SHOWN_CHARS = 40
_JSON_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))


def _shown(value: Any) -> str:
    return repr(value[:_MAX_SHOWN_CHARS]) if isinstance(value, str) else type(value).__name__


def _check_type(value: Any) -> Any:
    if value not in _SERVED:
        raise ValueError(f"got {_shown(value)}; must be a text, such as 'function'")
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


_NO_FUNCTION = FunctionDefinition.model_construct(name="")


class FunctionTool(StrictFields):
    """A function of the client. A ``custom`` tool is a function of one text. A tool of another
    type, such as a web search of OpenAI's servers, has no function and is left out."""

    type: Annotated[str, PlainValidator(_check_type)] = _FUNCTION
    function: FunctionDefinition
    custom: dict[str, Any] | None = None
    """What the function of a custom tool stands for."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: Callable[[Any], FunctionTool]) -> FunctionTool:
        match value:
            case {"type": "custom", "custom": dict(custom)}:
                if not isinstance(name := custom.get("name"), str) or not re.match(_NAME, name):
                    allowed = f"must have 1 to {MAX_TOOL_NAME_CHARS} letters, digits, '_' and '-'"
                    raise ValueError(f"custom.name: {allowed}")
                return handler({**value, "function": custom_function(custom)})
            case {"type": str(kind)} if kind != _FUNCTION:
                return cls.model_construct(type=kind, function=_NO_FUNCTION)
            case {"type": None}:
                return handler({**value, "type": _FUNCTION})
        return handler(value)

    @property
    def is_served(self) -> bool:
        return self.function is not _NO_FUNCTION

    @property
    def is_custom(self) -> bool:
        return self.type == _CUSTOM

    def definition(self) -> dict[str, Any]:
        """The function in OpenAI's form, as the request has it."""
        fields = self.model_dump(exclude_unset=True, exclude={"custom"})
        return {**fields, "type": _FUNCTION}


def _check_tools_size(value: Any) -> Any:
    is_long = isinstance(value, list) and len(value) > MAX_GIVEN_TOOLS
    return value if is_long else check_field_size(value)


ToolsField = Annotated[
    list[FunctionTool],
    Field(max_length=MAX_GIVEN_TOOLS, fail_fast=True),
    BeforeValidator(_check_tools_size),
]

OtherToolsField = Annotated[list[dict[str, Any]], Field(max_length=MAX_GIVEN_TOOLS, fail_fast=True)]
"""Tools of another API, which become functions."""


def _check_choice(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in _CHOICES):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return value
    match value:
        case {"type": "custom", "custom": {"name": str(name)}}:
            return {"type": _FUNCTION, _FUNCTION: {"name": name}}
    given = value.get("type") if isinstance(value, dict) else value
    raise ValueError(
        f"got {_shown(given)}; must be one of {', '.join(_CHOICES)} and "
        '{"type": "function", "function": {"name": …}}'
    )


ToolChoice = Annotated[
    str | dict[str, Any] | None, PlainValidator(_check_choice), AfterValidator(check_field_size)
]


def unknown_tool_fields(tools: list[FunctionTool]) -> list[str]:
    """Tools that are left out, fields that nothing reads, and keywords of strict schemas that the
    server leaves out."""
    names = []
    num_served = 0
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if not tool.is_served or num_served == MAX_TOOLS:
            names.append(path)
            continue
        num_served += 1
        if tool.custom is not None and not is_format_kept(tool.custom):
            names.append(f"{path}.custom.format")
        names += [f"{path}.{name}" for name in tool.unknown_fields()]
        names += [f"{path}.function.{name}" for name in tool.function.unknown_fields()]
        if tool.function.strict:
            names += unknown_keywords(tool.function.parameters, f"{path}.function.parameters")
    return names


def check_tools(tools: list[FunctionTool], choice: str | dict[str, Any] | None) -> None:
    """Raises ValueError, with the field's name before a colon."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if not tool.is_served or len(names) == MAX_TOOLS:
            continue
        name = tool.function.name
        if name in names:
            part = _CUSTOM if tool.is_custom else _FUNCTION
            raise ValueError(f"tools.{index}.{part}.name: another tool has the same name")
        names.add(name)
    reason = f"; {_WHY_LEFT_OUT}" if len(names) < len(tools) else ""
    if choice not in (None, "none", "auto") and not names:
        raise ValueError(f"tool_choice: only allowed with tools{reason}")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise ValueError(f"tool_choice.function.name: must be the name of one of the tools{reason}")
