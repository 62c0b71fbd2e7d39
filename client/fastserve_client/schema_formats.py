"""Which string formats of JSON schemas the server's grammars know.

``format`` is an annotation (JSON Schema 2020-12, validation, 7.2.1): an answer that ignores it
still follows the schema. So unknown formats are left out, and the gateway names them in its answer.
Other unknown keywords are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

KNOWN_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    )
)
"""The formats of llguidance, which a test compares; "unknown" is any text."""

# Keywords that hold schemas: by name, or one or a list of them. ``not`` and ``if`` are missing,
# because without a format inside them the schema would allow other answers.
_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
_ONE_OR_MORE = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("anyOf", "allOf", "oneOf", "then", "else"),
    )
)


def schema_parts(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all schemas inside it, each with its path.

    Args:
        schema: JSON; a value that is no object has no parts.
        path: the schema's path, with a dot at its end.
    """
    if not isinstance(schema, dict):
        return  # true and false are schemas too
    yield path, schema
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield from schema_parts(part, f"{path}{keyword}.{name}.")
        elif keyword in _ONE_OR_MORE and isinstance(value, list):
            for index, part in enumerate(value):
                yield from schema_parts(part, f"{path}{keyword}.{index}.")
        elif keyword in _ONE_OR_MORE:
            yield from schema_parts(value, f"{path}{keyword}.")


def has_unknown_format(part: dict[str, Any]) -> bool:
    """Whether this part itself has one; parts inside it do not count."""
    wanted = part.get("format")
    return isinstance(wanted, str) and wanted not in KNOWN_FORMATS


def without_unknown(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema in a form that llguidance takes."""
    copied = copy.deepcopy(dict(schema))
    for _, part in schema_parts(copied):
        if has_unknown_format(part):
            del part["format"]
        if part.get("uniqueItems") is False:  # the default, and llguidance refuses the keyword
            del part["uniqueItems"]
    return copied
