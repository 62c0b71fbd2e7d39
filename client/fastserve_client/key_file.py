"""The file of API keys: the gateway reads the keys, the engine the names and weights of tenants."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from fastserve_client.errors import ClientError

NO_NAME = ""
"""Name of a key without one. All such keys are one tenant."""
DEFAULT_WEIGHT = 1.0
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class KeyFileError(ClientError):
    """The file cannot be used. The message names the file and the line, and never quotes the line:
    it may hold a secret."""


@dataclass(frozen=True, slots=True)
class NamedKey:
    """One line of the file."""

    name: str
    """Of the tenant whom the key belongs to. A tenant may have several keys."""
    weight: float
    """A tenant's share of the machine is its weight over the weights of all tenants with jobs."""
    key: str
    most_urgent_priority: int | None
    """The least number that a request with this key may have as its priority. None: the line does
    not say it."""


def read_key_file(path: Path) -> list[NamedKey]:
    """Reads one key a line, at least one.

    A line is ``key``, ``name:key``, ``name:weight:key`` or ``name:weight:key:most_urgent_priority``
    in ASCII, so no key contains a colon. A name has at most 64 letters, digits, ``.``, ``_`` and
    ``-``. A key without a name has the name ``NO_NAME``, one without a weight the weight 1. Empty
    lines do not count, nor do blanks around a part.

    Raises:
        KeyFileError: the file cannot be read, has no key, or a line is wrong or contradicts an
            earlier one.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _error(path, getattr(error, "strerror", None) or "it is not ASCII") from None
    by_key: dict[str, NamedKey] = {}
    weights: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = _read_line(line)
            if by_key.setdefault(read.key, read) != read:
                raise ValueError("has the key of an earlier line, but says something else about it")
            if weights.setdefault(read.name, read.weight) != read.weight:
                raise ValueError(
                    f"gives {read.name!r} another weight than an earlier line; all keys of a "
                    "tenant must have the same weight"
                )
        except ValueError as error:
            raise _error(path, f"its line {number} {error}") from None
    if not by_key:
        raise _error(path, "it has no key, one a line")
    return list(by_key.values())


def _read_line(line: str) -> NamedKey:
    """Raises ValueError: the line is wrong; the message continues "its line 3"."""
    # OpenAI's own client sends only ASCII in a header.
    if not line.isascii():
        raise ValueError("is not ASCII, as a key must be for every client to send it")
    parts = [part.strip() for part in line.split(":")]
    if not all(parts) or len(parts) > 4:
        raise ValueError(
            "must be key, name:key, name:weight:key or name:weight:key:most_urgent_priority"
        )
    if len(parts) == 1:
        return NamedKey(NO_NAME, DEFAULT_WEIGHT, parts[0], None)
    name = parts[0]
    if not _NAME.fullmatch(name):
        raise ValueError("must have a name of at most 64 letters, digits, '.', '_' and '-'")
    if len(parts) == 2:
        return NamedKey(name, DEFAULT_WEIGHT, parts[1], None)
    weight = _weight(parts[1])
    return NamedKey(name, weight, parts[2], _priority(parts[3]) if len(parts) == 4 else None)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError("must have a weight above 0 between its first two colons, such as 2.5")
    return weight


def _priority(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must end with a whole number, the most urgent priority") from None


def _error(path: Path, reason: str) -> KeyFileError:
    return KeyFileError(f"got {str(path)!r}; {reason}")
