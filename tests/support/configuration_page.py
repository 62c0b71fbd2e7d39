"""Writes the tables of docs/configuration.md from the configuration and the registry of policies.

``make docs`` runs it. A test fails if the page differs from its output. The text between the tables
is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from fastserve_backend.config import EngineConfig
from fastserve_backend.scheduler.registry import BUILT_IN_POLICIES
from pydantic.fields import FieldInfo

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
# Each table is between a pair of these lines.
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = "| key | flag of `serve` | values | default | meaning |\n|---|---|---|---|---|\n"
_SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
_NAMES = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}


def with_tables(page: str) -> str:
    """Returns the page with new tables.

    Raises:
        ValueError: a table is missing, or there is one too many.
    """
    tables = {
        name: _section_table(section.annotation.model_fields)  # type: ignore[union-attr]
        for name, section in EngineConfig.model_fields.items()
    }
    tables["policies"] = _policies_table()
    found = [match[2] for match in _TABLE.finditer(page)]
    if sorted(found) != sorted(tables):
        raise ValueError(f"{PAGE}: the tables are of {found}, not of {list(tables)}")
    return _TABLE.sub(lambda match: match[1] + tables[match[2]] + match[3], page)


def _policies_table() -> str:
    rows = (f"| `{name}` | {policy.summary} |\n" for name, policy in BUILT_IN_POLICIES.items())
    return "| policy | what it does |\n|---|---|\n" + "".join(rows)


def _section_table(fields: dict[str, FieldInfo]) -> str:
    return _HEAD + "".join(_row(key, field) for key, field in fields.items())


def _row(key: str, field: FieldInfo) -> str:
    flag = "MODEL" if key == "model" else f"--{key.replace('_', '-')}"
    default = field.get_default()
    shown = "none" if default is None else f"`{str(default).lower()}`"
    if isinstance(default, str):
        shown = f"`{default}`"
    return f"| `{key}` | `{flag}` | {_values(field)} | {shown} | {field.description} |\n"


def _values(field: FieldInfo) -> str:
    kinds = ", ".join(
        [f"`{example}`" for example in field.examples]
        if field.examples
        else _alternatives(field.annotation)
    )
    return kinds + _limits(field.metadata)


def _limits(metadata: Iterable[Any]) -> str:
    limits = " and ".join(
        f"{sign} {_number(getattr(limit, name))}"
        for kind, name, sign in _SIGNS
        for limit in metadata
        if isinstance(limit, kind)
    )
    return f" {limits}" if limits else ""


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def _alternatives(annotation: Any) -> list[str]:
    """The values that a field allows besides None: ``auto`` or a number, one of some words, …"""
    if annotation in _NAMES:
        return [_NAMES[annotation]]
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        limits = [limit for field in metadata for limit in field.metadata]
        return [f"{name}{_limits(limits)}" for name in _alternatives(kind)]
    if get_args(annotation):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return [name for part in parts for name in _alternatives(part)]
    return [f"`{annotation}`"]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
