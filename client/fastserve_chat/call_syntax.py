"""How a format writes calls, as data: what their text begins with, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple


class HeaderItem(Enum):
    """A part of a ``Header`` that is no literal."""

    SPACE = "space"
    """White space, or none."""
    NAME = "name"
    """The name of the tool."""
    WORD = "word"
    """Letters and digits that mean nothing here."""
    VALUE = "value"
    """No text: the value begins here."""


SPACE, NAME, WORD, VALUE = HeaderItem.SPACE, HeaderItem.NAME, HeaderItem.WORD, HeaderItem.VALUE

Header = tuple[str | HeaderItem, ...]
"""What calls begin with. Of several headers at most one fits a text, since they differ before the
place where the first of them is complete."""

# Names of tools have at most 64. Without a limit, a text would be read again for each token.
_MAX_ITEM_CHARS = 128
_WORD_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class HeaderMatch(NamedTuple):
    value_begin: int
    name: str | None


class Mismatch(NamedTuple):
    length: int
    """Characters that fit."""


def match_header(header: Header, text: str) -> HeaderMatch | Mismatch | None:
    """Whether ``text`` begins with the header; None: it is too short to tell."""
    position, value_begin, name = 0, 0, None
    for item in header:
        match item:
            case str():
                part = text[position : position + len(item)]
                if not item.startswith(part):
                    return Mismatch(position)
                if len(part) < len(item):
                    return None
                position += len(item)
            case HeaderItem.VALUE:
                value_begin = position
            case _:
                begin = position
                end = min(len(text), begin + _MAX_ITEM_CHARS + 1)
                while position < end and _fits(item, text[position]):
                    position += 1
                if position - begin > _MAX_ITEM_CHARS:
                    return Mismatch(position)
                if position == len(text):
                    return None
                if item is not SPACE and position == begin:
                    return Mismatch(position)
                if item is NAME:
                    name = text[begin:position]
    return HeaderMatch(value_begin, name)


def _fits(item: HeaderItem, letter: str) -> bool:
    return letter.isspace() if item is SPACE else letter in _WORD_CHARS


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How models write calls by themselves."""

    headers: tuple[Header, ...]
    """A header whose first item is ``SPACE`` counts only where an answer begins, or behind a
    call."""
    value: Literal["json", "python", "xml"] = "json"
    terminator: str = ""
    """The text at which a value ends, which is not part of it; empty: at its closing bracket."""
    closers: tuple[str, ...] = ()
    """What may follow a value, with white space before it. It has no meaning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may begin calls anywhere."""
        return tuple({str(one[0]): None for one in self.headers if isinstance(one[0], str)})

    @property
    def is_bare(self) -> bool:
        """Whether calls may begin without a mark."""
        return any(one[0] is SPACE for one in self.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """What a grammar puts around the names and the JSON arguments of calls."""

    mark: str
    """The beginning of the first call's text, which free text then cannot contain. Empty: calls
    are all of the answer, and free text cannot begin as they do."""
    begin: str = ""
    """Before the first call."""
    before_name: str
    after_name: str
    after_arguments: str = ""
    between: str = ""
    end: str = ""
    """Behind the last call."""

    @property
    def opening(self) -> str:
        """All that is before the first name."""
        return self.begin + self.before_name


def partial_suffix(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of ``text`` that more text could make one of ``marks``."""
    longest = min(len(text), max(map(len, marks), default=0))
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
