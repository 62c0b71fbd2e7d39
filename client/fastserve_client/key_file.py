"""The file of API keys: the gateway reads the keys, the engine the names and weights of tenants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fastserve_client.errors import ClientError
from fastserve_client.positive_number import positive_number

NO_NAME = ""
"""Name of a key without one. All such keys are one tenant."""
DEFAULT_WEIGHT = 1.0
# Names go to metrics and logs. Many keys begin with "sk-", so a name that does is no name, but the
# beginning of a key with a colon, or a key in the name's place.
_NAME = re.compile(r"(?!sk-)[A-Za-z0-9._-]{1,64}")
_FORMS = (
    "key, name:key, name:weight:key or name:weight:key:most_urgent_priority; a key that contains "
    "colons has no name and is written with one more colon in front, :key"
)


class KeyFileError(ClientError):
    """The file cannot be used. The message names the file and the line, and never quotes the line:
    it may hold a secret."""


@dataclass(frozen=True, slots=True)
class NamedKey:
    """One line of the file."""

    name: str
    """Of the tenant whom the key belongs to. A tenant may have several keys, with one weight and
    one most urgent priority."""
    weight: float
    """A tenant's share of the machine is its weight over the weights of all tenants with jobs."""
    key: str
    most_urgent_priority: int | None
    """The least number that a request with this key may have as its priority. None: the line does
    not say it."""


def read_key_file(path: Path) -> list[NamedKey]:
    """Reads one key a line, at least one.

    A line is ``key``, ``name:key``, ``name:weight:key`` or ``name:weight:key:most_urgent_priority``
    in ASCII. What follows a colon at the beginning of a line is a key without a name, which may
    contain colons. A key without a name has the name ``NO_NAME``, one without a weight the weight
    1. Empty lines do not count, nor do blanks around a part.

    Raises:
        KeyFileError: the file cannot be read, has no key, or a line is wrong or contradicts an
            earlier one.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _error(path, getattr(error, "strerror", None) or "it is not ASCII") from None
    by_key: dict[str, NamedKey] = {}
    tenants: dict[str, tuple[float, int | None]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = _read_line(line)
            if by_key.setdefault(read.key, read) != read:
                raise ValueError("has the key of an earlier line, but says something else about it")
            said = (read.weight, read.most_urgent_priority)
            if tenants.setdefault(read.name, said) != said:
                raise ValueError(
                    f"gives {read.name!r} another weight or most urgent priority than an earlier "
                    "line; all keys of a tenant must have the same"
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
    before, colon, rest = (part.strip() for part in line.partition(":"))
    if not before or not colon:
        if not (before or rest):
            raise ValueError("has no key")
        return NamedKey(NO_NAME, DEFAULT_WEIGHT, before or rest, None)
    name, *parts = (part.strip() for part in line.split(":"))
    if not all(parts) or len(parts) > 3:
        raise ValueError(f"must be {_FORMS}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            "has a name that is none: 1 to 64 letters, digits, '.', '_' and '-', without 'sk-' in "
            f"front; a line is {_FORMS}"
        )
    if len(parts) == 1:
        return NamedKey(name, DEFAULT_WEIGHT, parts[0], None)
    weight = _weight(parts[0])
    return NamedKey(name, weight, parts[1], _priority(parts[2]) if len(parts) == 3 else None)


def _weight(text: str) -> float:
    weight = positive_number(text)
    if weight is None:
        raise ValueError("must have a weight above 0 between its first two colons, such as 2.5")
    return weight


def _priority(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must end with a whole number, the most urgent priority") from None


def _error(path: Path, reason: str) -> KeyFileError:
    return KeyFileError(f"got {str(path)!r}; {reason}")
