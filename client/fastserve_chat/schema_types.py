"""Which JSON types a schema allows: for formats in which models write arguments without quotes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastserve_client.property_names import target

_TYPES = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
)


def json_types(value: Any) -> tuple[str, ...]:
    """The types in a schema that a value has."""
    return next((names for kind, names in _TYPES if isinstance(value, kind)), ("null",))


def property_schema(parameters: Mapping[str, Any], name: str) -> Any:
    """The schema of a parameter; None: there is none."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return parameters.get("additionalProperties")


def allowed_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types of the values that a schema allows, through references, alternatives and lists of
    values. Empty: it does not say.

    Args:
        root: the schema that references begin at.
    """
    return frozenset(_types(schema, root, set()))


def _types(schema: Any, root: Mapping[str, Any], followed: set[str]) -> Iterator[str]:
    """``followed`` has the references so far: a schema may refer to itself."""
    if not isinstance(schema, Mapping):
        return
    if "const" in schema:
        yield json_types(schema["const"])[0]
    elif isinstance(schema.get("enum"), list):
        yield from (json_types(one)[0] for one in schema["enum"])
    elif isinstance(kind := schema.get("type"), str):
        yield kind
    elif isinstance(kind, list):
        yield from (one for one in kind if isinstance(one, str))
    elif isinstance(reference := schema.get("$ref"), str):
        if reference not in followed:
            followed.add(reference)
            yield from _types(target(root, reference), root, followed)
    else:
        for name in ("anyOf", "oneOf", "allOf"):
            for one in schema[name] if isinstance(schema.get(name), list) else ():
                yield from _types(one, root, followed)
