"""What a JSON schema says about the names of an object's properties, as a pattern of them.

llguidance knows ``patternProperties`` and not ``propertyNames``, which libraries write for maps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_MAX_STEPS = 8
"""Of references to references."""


def has_any_name(part: Mapping[str, Any]) -> bool:
    """Whether ``propertyNames`` is missing or allows all names: they are texts anyway."""
    return part.get("propertyNames", True) in ({"type": "string"}, {}, True)


def with_name_pattern(part: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema without ``propertyNames``, which allows the same objects.

    Args:
        part: a schema with ``propertyNames``.
        root: the whole schema, in which references begin.

    Returns:
        None: no other keyword says the same.
    """
    pattern = _pattern(part.get("propertyNames"), root)
    if pattern is None or part.get("properties") or part.get("patternProperties"):
        return None
    values = part.get("additionalProperties", True)
    changed = {name: value for name, value in part.items() if name != "propertyNames"}
    changed["additionalProperties"] = False
    if values is not False:
        changed["patternProperties"] = {pattern: {} if values is True else values}
    return changed


def _pattern(names: Any, root: Mapping[str, Any]) -> str | None:
    """A pattern for the names that a schema allows."""
    for _ in range(_MAX_STEPS):
        if not isinstance(names, Mapping) or not isinstance(names.get("$ref"), str):
            break
        names = target(root, names["$ref"])
    if not isinstance(names, Mapping):
        return None
    told = {name for name in names if name in ("enum", "const", "pattern", "format")}
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    has_length = "minLength" in names or "maxLength" in names
    choices = [names["const"]] if told == {"const"} else names.get("enum")
    if told <= {"enum", "const"} and isinstance(choices, list) and not has_length:
        texts = [one for one in choices if isinstance(one, str)]
        return f"^(?:{'|'.join(_SPECIAL.sub(_escaped, one) for one in texts)})$" if texts else None
    if told == {"pattern"} and isinstance(names["pattern"], str) and not has_length:
        return str(names["pattern"])
    if not told and has_length and type(least) is int and (most == "" or type(most) is int):
        return rf"^[\s\S]{{{least},{most}}}$"
    return None


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"


def target(root: Any, reference: str) -> Any:
    """What a reference inside the schema points at (RFC 6901); None: it points elsewhere."""
    if not reference.startswith("#"):
        return None
    for step in filter(None, reference[1:].split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root
