"""Typed reading of Hugging Face's config.json.

It reads the JSON itself. `transformers.AutoConfig` takes seconds to import, and it imports torch,
which the engine's process must never do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.limits import (
    END_TOKENS,
    LEAST_NUMBER,
    MOST_NUMBER,
    most_of_field,
)

_Choice = TypeVar("_Choice", bound=str)

# The attention kernels' vector loads and registers set these limits.
_HEAD_DIM_STEP, _HEAD_DIM_MAX = 8, 256
# A value may be as long as its file.
_SHOWN_CHARS = 200


class HFConfig:
    """The fields of a config.json. Every getter raises ModelError, naming file, field and value."""

    def __init__(
        self, raw: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None
    ) -> None:
        """names: the file's own names for fields, where they differ, for messages."""
        self.source = source
        self._raw = raw
        self._names = names or {}

    def __contains__(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def names(self) -> tuple[str, ...]:
        return tuple(self._raw)

    def error(self, key: str, allowed: str) -> ModelError:
        """The error to raise for field `key`, whose value is not `allowed`."""
        shown = repr(self._raw.get(key))
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}…"
        name = self._names.get(key, key)
        return ModelError(f"{self.source}: {name} is {shown}, expected {allowed}")

    def integer(self, key: str, default: int) -> int:
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "an integer of at least 1")
        if value > (most := most_of_field(key)):
            raise self.error(key, f"a plausible integer, at most {most}")
        return value

    def whole_number(self, key: str, default: int) -> int:
        """An integer of at least 0."""
        return 0 if self._raw.get(key) == 0 else self.integer(key, default)

    def number(self, key: str, default: float | None) -> float:
        """A finite number above 0, or ``default`` if there is none. Without a default (None) the
        field must be there."""
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise self.error(key, "a number above 0")
        if not LEAST_NUMBER <= value <= MOST_NUMBER:
            allowed = f"a plausible number, from {LEAST_NUMBER:g} to {MOST_NUMBER:g}"
            raise self.error(key, allowed)
        return float(value)

    def number_or_zero(self, key: str) -> float:
        """A finite number above 0; 0 if the field is 0 or missing."""
        return 0.0 if self._raw.get(key) == 0 else self.number(key, 0.0)

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """An integer of at least 1; None if the field is null, ``default`` if it is missing."""
        if key in self._raw and self._raw[key] is None:
            return None
        return default if key not in self else self.integer(key, 1)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A finite number above 0; None if the field is null, ``default`` if it is missing."""
        if key in self._raw and self._raw[key] is None:
            return None
        return default if key not in self else self.number(key, None)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """``count`` finite numbers above 0."""
        values = self._raw.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, f"a list of {count} numbers")
        items = (HFConfig({key: value}, self.source) for value in values)
        return tuple(item.number(key, None) for item in items)

    def integers(self, key: str, count: int) -> tuple[int, ...]:
        """``count`` integers of at least 1."""
        values = self._raw.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, f"a list of {count} integers")
        return tuple(HFConfig({key: value}, self.source).integer(key, 1) for value in values)

    def choices(
        self, key: str, default: tuple[_Choice, ...], allowed: tuple[_Choice, ...]
    ) -> tuple[_Choice, ...]:
        """A choice for each of ``len(default)`` layers."""
        values = self._raw.get(key)
        if values is None:
            return default
        if not isinstance(values, list) or len(values) < len(default):
            raise self.error(key, f"a list with an entry for each of {len(default)} layers")
        for value in values[: len(default)]:
            HFConfig({key: value}, self.source).choice(key, None, allowed)
        return tuple(values[: len(default)])

    def flags(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A 0 or 1 for each of ``len(default)`` layers."""
        values = self._raw.get(key)
        if values is None:
            return default
        if not isinstance(values, list) or any(value not in (0, 1) for value in values):
            raise self.error(key, "a list of 0 and 1")
        if len(values) < len(default):
            raise self.error(key, f"an entry for each of {len(default)} layers")
        return tuple(map(int, values[: len(default)]))

    def indices(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty if the field is missing."""
        values = [] if key not in self else self._raw[key]
        if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
            raise self.error(key, "a list of numbers from 0")
        return tuple(values)

    def states(self, key: str, values: Collection[str | int]) -> bool:
        """Whether the field has one of these values."""
        return self._raw.get(key) in values

    def with_default(self, key: str, value: object) -> HFConfig:
        """The same fields, and this one if it is missing."""
        return self if key in self else self.with_value(key, value)

    def with_value(self, key: str, value: object) -> HFConfig:
        """The same fields, but this one."""
        return HFConfig({**self._raw, key: value}, self.source, self._names)

    def without(self, *keys: str) -> HFConfig:
        """The same fields, but these."""
        fields = {name: value for name, value in self._raw.items() if name not in keys}
        return HFConfig(fields, self.source, self._names)

    def renamed(self, names: Mapping[str, str]) -> HFConfig:
        """The same fields, but by our names. names: theirs -> ours."""
        found = {theirs: ours for theirs, ours in names.items() if theirs in self._raw}
        fields = {**self._raw, **{ours: self._raw[theirs] for theirs, ours in found.items()}}
        own_names = {ours: theirs for theirs, ours in found.items()}
        return HFConfig(fields, self.source, {**self._names, **own_names})

    def with_one_for_all(self, key: str) -> HFConfig:
        """The same fields, with a number in place of a list that has it for each layer."""
        value = self._raw.get(key)
        if not isinstance(value, list):
            return self
        if not value or any(one != value[0] for one in value):
            raise self.error(key, "one number for all layers")
        return self.with_value(key, value[0])

    def period(self, key: str, default: int) -> int:
        """After how many layers a pattern repeats: a number, or a letter for each layer of one
        period."""
        value = self._raw.get(key)
        if isinstance(value, str) and value:
            return len(value)
        return self.integer(key, default)

    def mapping(self, key: str) -> HFConfig | None:
        """The fields of an object; None if it is missing or empty."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return HFConfig(value, f"{self.source}, {key}") if value else None

    def boolean(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, default: _Choice | None, allowed: tuple[_Choice, ...]) -> _Choice:
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if value not in allowed:
            raise self.error(key, f"one of {', '.join(allowed)}")
        chosen: _Choice = value
        return chosen

    def token_ids(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """One id or a list of ids. An explicit null or -1 means none."""
        if key not in self._raw:
            return default
        value = self._raw[key]
        values = [] if value in (None, -1) else value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self.error(key, "a token id, a list of them, null or -1")
        if len(values) > END_TOKENS:
            raise self.error(key, f"at most {END_TOKENS} token ids")
        return tuple(values)


def checked_head_dim(raw: HFConfig, head_dim: int) -> int:
    """`head_dim` (elements of a head) if the attention kernels support it, else ModelError."""
    if head_dim % _HEAD_DIM_STEP or head_dim > _HEAD_DIM_MAX:
        raise ModelError(
            f"{raw.source}: hidden_size / heads is {head_dim}, but the attention kernels "
            f"need a multiple of {_HEAD_DIM_STEP} up to {_HEAD_DIM_MAX}"
        )
    return head_dim
