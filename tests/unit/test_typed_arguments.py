"""Arguments without quotes get the types that the tool's schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastserve_chat.tool import Tool
from fastserve_chat.written_calls import xml_call

DEFINITIONS = {
    "Name": {"type": "string"},
    "Level": {"enum": ["1", "2"]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Name"}]},
    "a/b": {"type": "string"},
}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"oneOf": [{"type": "string"}]},
        {"allOf": [{"$ref": "#/$defs/Name"}, {"description": "A name."}]},
        {"$ref": "#/$defs/Name", "description": "A name."},
        {"$ref": "#/$defs/Level"},
        {"$ref": "#/$defs/Loop"},
        {"$ref": "#/$defs/a~1b"},
        {"enum": ["1", "true"]},
        {"const": "1"},
        {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}], "default": None},
    ],
)
@pytest.mark.parametrize("text", ["1", "true", '{"a": 1}', "Paris", '"quoted"'])
def test_a_string_stays_a_string(schema: dict[str, Any], text: str) -> None:
    assert argument(text, schema) == text


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "7", 7),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": ["integer", "string"]}, "7.5", "7.5"),
        ({"type": ["boolean", "string"]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '{"a": 1}', '{"a": 1}'),
        ({"enum": [1, "one"]}, "1", 1),
        ({"enum": [1, "one"]}, "one", "one"),
        ({}, "7", 7),
        ({"$ref": "#/$defs/Missing"}, "7", 7),
        ({"$ref": "elsewhere.json"}, "7", 7),
        (True, "7", 7),
    ],
)
def test_other_values_are_json(schema: Any, text: str, value: Any) -> None:
    assert argument(text, schema) == value


def test_parameters_that_have_no_names() -> None:
    tool = Tool("f", {"type": "object", "additionalProperties": {"type": "string"}})
    assert json.loads(xml_call("<parameter=a>1</parameter>", tool).arguments) == {"a": "1"}


def argument(text: str, schema: Any) -> Any:
    tool = Tool("f", {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS})
    return json.loads(xml_call(f"<parameter=a>\n{text}\n</parameter>", tool).arguments)["a"]
