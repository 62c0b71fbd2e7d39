"""Finds where a value in brackets ends, while its text still arrives."""

from __future__ import annotations

import re

_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


class BracketScanner:
    """Follows one value, in time that is linear in its length.

    Args:
        quotes: the characters that begin and end strings; brackets in them do not count.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._outside = re.compile(f"[][(){{}}{quotes}]")
        self._inside = {quote: re.compile(rf"[\\{quote}]") for quote in quotes}
        self._position = 0
        self._depth = 0
        self._quote: str | None = None

    def find_end(self, text: str, begin: int) -> int:
        """The index behind the closing bracket; -1: it is still to come.

        Args:
            text: that of the call before, or the same with more at its end.
            begin: the index of the opening bracket.
        """
        position = max(self._position, begin)
        while True:
            pattern = self._outside if self._quote is None else self._inside[self._quote]
            found = pattern.search(text, position)
            if found is None:
                self._position = len(text)
                return -1
            position = found.end()
            mark = found[0]
            if mark == "\\":
                if position == len(text):  # what it escapes is still to come
                    self._position = position - 1
                    return -1
                position += 1
            elif mark in self._inside:
                self._quote = mark if self._quote is None else None
            elif mark in _OPENING:
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return position
