"""What the server's grammars leave out of JSON schemas.

``format`` is an annotation (JSON Schema 2020-12, validation, 7.2.1): an answer that ignores it
still follows the schema. So unknown formats are left out, and the gateway names them in its answer.
So are ``uniqueItems`` and some forms of ``propertyNames``: libraries write them for sets and maps,
and no grammar knows them. Other unknown keywords are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fastserve_client.property_names import has_any_name, with_name_pattern

KNOWN_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    )
)
"""The formats of llguidance, which a test compares; "unknown" is any text."""

_MAX_STEP_CHARS = 64

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


class SchemaPlace(NamedTuple):
    """Where a schema is inside another one. Few places are ever written, and a path may be as long
    as the schema: so it is text only when somebody asks for it."""

    outer: SchemaPlace | None
    """None: the place is in the whole schema."""
    steps: tuple[str | int, ...]
    """A keyword, and the name or the index of one of its schemas."""

    def text(self) -> str:
        """Such as ``properties.city.items``. Of a long name it has the beginning."""
        steps: list[str] = []
        place: SchemaPlace | None = self
        while place is not None:
            steps += [str(step)[:_MAX_STEP_CHARS] for step in reversed(place.steps)]
            place = place.outer
        return ".".join(reversed(steps))


def schema_parts(schema: Any) -> Iterator[tuple[SchemaPlace | None, dict[str, Any]]]:
    """The schema and all schemas inside it, each with its place; None: it is the whole.

    Args:
        schema: JSON; a value that is no object has no parts.
    """
    if isinstance(schema, dict):  # true and false are schemas too
        yield None, schema
        # Not recursive: each part would go through all generators above it.
        waiting = [_parts_inside(None, schema)]
        while waiting:
            found = next(waiting[-1], None)
            if found is None:
                waiting.pop()
            elif isinstance(found[1], dict):
                yield found
                waiting.append(_parts_inside(*found))


def _parts_inside(
    outer: SchemaPlace | None, schema: dict[str, Any]
) -> Iterator[tuple[SchemaPlace, Any]]:
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield SchemaPlace(outer, (keyword, name)), part
        elif keyword in _ONE_OR_MORE and isinstance(value, list):
            for index, part in enumerate(value):
                yield SchemaPlace(outer, (keyword, index)), part
        elif keyword in _ONE_OR_MORE:
            yield SchemaPlace(outer, (keyword,)), value


def left_out_keywords(part: dict[str, Any], root: Mapping[str, Any]) -> list[str]:
    """The keywords of this part that no grammar enforces; parts inside it do not count.

    Args:
        root: the whole schema.
    """
    names = []
    if _has_unknown_format(part):
        names.append("format")
    if part.get("uniqueItems") is True:
        names.append("uniqueItems")
    if not has_any_name(part) and with_name_pattern(part, root) is None:
        names.append("propertyNames")
    return names


def _has_unknown_format(part: dict[str, Any]) -> bool:
    wanted = part.get("format")
    return isinstance(wanted, str) and wanted not in KNOWN_FORMATS


def without_unknown(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema in a form that llguidance takes."""
    copied = copy.deepcopy(dict(schema))
    for _, part in schema_parts(copied):
        if _has_unknown_format(part):
            del part["format"]
        if isinstance(part.get("uniqueItems"), bool):
            del part["uniqueItems"]
        if not has_any_name(part) and (changed := with_name_pattern(part, copied)) is not None:
            part.clear()
            part.update(changed)
        part.pop("propertyNames", None)  # zod has it in each record
        if part.get("required", ()) is None:
            del part["required"]
    return copied
