"""The form that a client wants an answer to have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from fastserve_backend.errors import InvalidRequestError

FIELD = "structured_output"
Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
# A larger grammar would hardly fit the limits of the compiler.
MAX_TEXT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Exactly one form. Whether it can be compiled to a grammar is checked later.

    Raises:
        InvalidRequestError: no or several forms are given, or one has a wrong type or is too large.
    """

    json_schema: Mapping[str, Any] | None = None
    """The answer is JSON that this schema describes."""
    json_object: bool | None = None
    """True: the answer is any JSON object."""
    regex: str | None = None
    """The whole answer matches this (syntax of Rust's crate regex, without lookaround)."""
    choice: Sequence[str] | None = None
    """The answer is one of these; a text alone is the only choice."""
    grammar: str | None = None
    """This grammar derives the answer; its syntax is llguidance's variant of Lark."""
    kind: Kind = field(init=False)
    """Name of the form that is given."""
    text: str = field(init=False)
    """Its value; a schema and choices as JSON."""

    def __post_init__(self) -> None:
        given = {name: value for name in KINDS if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise InvalidRequestError(FIELD, what, f"must have exactly one of {', '.join(KINDS)}")
        [(kind, value)] = given.items()
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", _text(kind, value))
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise _invalid(kind, value, "must be valid Unicode") from None
        if size > MAX_TEXT_BYTES:
            raise _invalid(kind, f"{size} bytes", f"at most {MAX_TEXT_BYTES} bytes are allowed")

    @classmethod
    def of(cls, value: object) -> StructuredOutput:
        """From a request's JSON. Raises InvalidRequestError."""
        if not isinstance(value, Mapping):
            allowed = f"must be a JSON object with one of {', '.join(KINDS)}"
            raise InvalidRequestError(FIELD, value, allowed)
        for name in value:
            if name not in KINDS:
                allowed = f"unknown; allowed is one of {', '.join(KINDS)}"
                raise InvalidRequestError(FIELD, name, allowed)
        return cls(**value)


KINDS = tuple(one.name for one in fields(StructuredOutput) if one.init)


def _text(kind: str, value: Any) -> str:
    match kind:
        case "json_object":
            if value is not True:
                raise _invalid(kind, value, "must be true, or left out")
            return '{"type": "object"}'
        case "json_schema":
            if not isinstance(value, Mapping):
                raise _invalid(kind, value, "must be a JSON object")
        case "choice":
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, Sequence) or not value:
                raise _invalid(kind, value, "must be a list of at least one text")
            for one in value:
                if not isinstance(one, str) or not one:
                    raise _invalid(kind, one, "each choice is a text of at least one character")
        case _:
            if not isinstance(value, str) or not value:
                raise _invalid(kind, value, "must be a text of at least one character")
            return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _invalid(kind, value, "must be valid JSON") from None


def _invalid(kind: str, given: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD}.{kind}", given, allowed)
