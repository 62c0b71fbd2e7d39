"""pydantic's reasons for refusing a value, in the words of this project's messages."""

from __future__ import annotations

import re

# Their own messages name Python classes.
_OBJECTS = ("model_type", "dict_type")
_BY_TYPE = {
    "missing": "must be given",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
}
_SHOULD = re.compile(r"^\w+ should (be|have) ")
_NOT = re.compile(r" after validation, not \d+$")
_COMPARISONS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}


def what_is_allowed(kind: str, message: str, an_object: str) -> str:
    """What a field must be: "must be at least 1".

    Args:
        kind: the ``type`` of pydantic's error.
        message: its ``msg``.
        an_object: what the reader calls a value with named fields.
    """
    if kind in _OBJECTS:
        return f"must be {an_object}"
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if _SHOULD.match(message) is None:  # it is this project's own
        return message.removeprefix("Value error, ")
    message = _NOT.sub("", _SHOULD.sub(r"must \1 ", message))
    for words, plain in _COMPARISONS.items():
        message = message.replace(words, plain)
    return message
