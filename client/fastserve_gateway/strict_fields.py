"""The base of bodies and of their parts."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice
from typing import Any

from fastserve_client.schema_formats import left_out_keywords, schema_parts
from pydantic import BaseModel, ConfigDict, model_validator

MAX_NAMES = 20
"""Unknown fields of one object that are named."""
MAX_NAME_CHARS = 64
MAX_FIELDS = 1024
"""Of one object with declared fields. Each other field takes pydantic a microsecond."""


def check_number_of_fields(value: Any) -> Any:
    """Returns the value. Raises ValueError: it is an object of more than ``MAX_FIELDS``."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"got {len(value)} fields; at most {MAX_FIELDS} are allowed")
    return value


def first_names(names: Iterable[str]) -> list[str]:
    """The first of many names, each cut: a client may give its fields any names."""
    return [name[:MAX_NAME_CHARS] for name in islice(names, MAX_NAMES)]


def unknown_keywords(schema: Any, path: str) -> list[str]:
    """The first keywords of a schema that the server leaves out.

    Args:
        path: the schema's.
    """
    found = (
        (place, name)
        for place, part in schema_parts(schema)
        for name in left_out_keywords(part, schema)
    )
    return [
        f"{path}.{name}" if place is None else f"{path}.{place.text()}.{name}"
        for place, name in islice(found, MAX_NAMES)
    ]


class StrictFields(BaseModel):
    """Strict: "5" is not 5. Undeclared fields are kept, so that they can be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: Any) -> Any:
        return check_number_of_fields(value)

    def unknown_fields(self) -> list[str]:
        """Fields that nothing here reads, up to ``MAX_NAMES``. A field that is null does not count,
        and neither do those of ``read_elsewhere``."""
        given = (self.model_extra or {}).items()
        return first_names(
            name for name, value in given if value is not None and name not in self.read_elsewhere()
        )

    def read_elsewhere(self) -> Container[str]:
        """Undeclared fields that are read all the same, or change nothing."""
        return ()


class Body(StrictFields):
    """The body of a request."""

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1
