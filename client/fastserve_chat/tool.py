"""The tools that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    """A JSON schema of an object."""
    strict: bool = False
    """Whether the arguments of each call must follow the schema."""
