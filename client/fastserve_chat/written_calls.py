"""The values in which models write calls: JSON, Python and XML. Each becomes a name and JSON."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any, NamedTuple, NoReturn

from fastserve_chat.schema_types import allowed_types, json_types, property_schema
from fastserve_chat.tool import Tool

_PARAMETER_BEGIN, _PARAMETER_END = "<parameter=", "</parameter>"
# A value may have the closing mark inside: the one that ends it comes before another parameter or
# at the end.
_PARAMETER = re.compile(
    rf"\s*{_PARAMETER_BEGIN}([^>\n]+)>(.*?){_PARAMETER_END}(?=\s*(?:{_PARAMETER_BEGIN}|\Z))\s*",
    re.DOTALL,
)
NO_ARGUMENTS = "{}"
"""Of a call that has none."""
_JSON_NAMES = {"true": True, "false": False, "null": None}


class NoCallError(Exception):
    """A text looked like calls, but is none."""


class WrittenCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object."""


def json_calls(text: str, name: str | None) -> list[WrittenCall]:
    """Calls in JSON: the arguments of the function ``name``, or else an object with its name, or a
    list of such objects.

    Raises NoCallError.
    """
    value = _loads(text)
    if name is not None:
        return [_call(name, value)]
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise NoCallError
    return [_named_call(entry) for entry in entries]


def python_calls(text: str) -> list[WrittenCall]:
    """Calls in Python: a list such as ``[f(a=1), g()]``, or a call on each line. JSON's names of
    values count too.

    Raises NoCallError.
    """
    try:
        written = [one.value for one in ast.parse(text.strip()).body if isinstance(one, ast.Expr)]
        if len(written) == 1 and isinstance(written[0], ast.List):
            written = written[0].elts
        if not written:
            raise NoCallError
        return [_python_call(one) for one in written]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoCallError from None


def xml_call(text: str, tool: Tool) -> WrittenCall:
    """A call whose parameters are elements: ``<parameter=a>1</parameter>``. Their values are JSON,
    except where the tool's schema allows a string and not the JSON.

    Raises NoCallError.
    """
    arguments: dict[str, Any] = {}
    position = 0
    for found in _PARAMETER.finditer(text):
        if found.start() != position:
            raise NoCallError
        position = found.end()
        name, value = found[1], found[2].removeprefix("\n").removesuffix("\n")
        arguments[name] = _typed_value(value, name, tool)
    if text[position:].strip():
        raise NoCallError
    return _call(tool.name, arguments)


def is_xml_closed(text: str) -> bool:
    """Whether the text of a call's parameters may end here, and not inside a value."""
    return _PARAMETER_BEGIN not in text or text.rstrip().endswith(_PARAMETER_END)


def read_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call that a grammar enforced; ``None``: the answer is cut off in them, or
    they are nested too deeply, or have a number that is no double."""
    try:
        value = _loads(text)
    except NoCallError:
        return None
    return value if isinstance(value, dict) else None


def _python_call(node: ast.expr) -> WrittenCall:
    if not isinstance(node, ast.Call) or node.args:
        raise NoCallError
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        value = _python_value(keyword.value)
        if keyword.arg is not None:
            arguments[keyword.arg] = value
        elif isinstance(value, dict):
            arguments |= value
        else:
            raise NoCallError
    return _call(ast.unparse(node.func), arguments)


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(values) | ast.Tuple(values):
            return [_python_value(one) for one in values]
        case ast.Dict(keys, values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {
                ast.literal_eval(key): _python_value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    return ast.literal_eval(node)


def _named_call(entry: Any) -> WrittenCall:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise NoCallError
    for key in ("arguments", "parameters"):
        if key in entry:
            return _call(entry["name"], entry[key])
    if entry.keys() <= {"name", "id", "type"}:  # of a tool without parameters
        return _call(entry["name"], {})
    raise NoCallError


def _call(name: str, arguments: Any) -> WrittenCall:
    if arguments is None or arguments == "":  # of a tool without parameters
        arguments = {}
    if isinstance(arguments, str):  # some models write JSON inside JSON
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise NoCallError
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which only an escape can hold
        text = json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        raise NoCallError from None
    return WrittenCall(name, text)


def _loads(text: str) -> Any:
    try:
        # Not strict: models write line breaks in strings.
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        raise NoCallError from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _typed_value(text: str, name: str, tool: Tool) -> Any:
    types = allowed_types(property_schema(tool.parameters, name), tool.parameters)
    if types and types <= {"string", "null"}:
        return text
    value = _json_or_text(text)
    takes_text = "string" in types and types.isdisjoint(json_types(value))
    return text if takes_text else value


def _json_or_text(text: str) -> Any:
    try:
        return _loads(text)
    except NoCallError:
        return _JSON_NAMES.get(text.lower(), text)
