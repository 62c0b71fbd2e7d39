"""Where in a text its tokens begin, some of which are parts of characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

_BROKEN = "\ufffd"
_MAX_BYTES = 4
# Bounds the work a token, for long texts of which no character is whole in a token.
_MAX_PLACES = 64

_Place: TypeAlias = tuple[int, int]
"""Characters that are complete, and bytes of the next one."""


class TextOffsets:
    """Of one text, in order.

    The server tells a token's text, not its bytes. In it U+FFFD stands for the 1 to 3 bytes with
    which a character begins, and for each byte that continues one. Which characters these are, the
    whole text says. So each token has several places to which it may lead, of which those count
    from which the rest of the text can be reached.
    """

    def __init__(self) -> None:
        self._text = ""
        self._places: Sequence[_Place] = [(0, 0)]

    def add(self, tokens: Sequence[str], text: str) -> list[int]:
        """The offset of each token, in characters; of one that continues a character, where that
        begins.

        Args:
            tokens: the next ones, each by its own text.
            text: what they add to the text; the end of it may come later.
        """
        self._text += text
        ways: list[dict[_Place, _Place]] = []
        places = self._places
        for token in tokens:
            way: dict[_Place, _Place] = {}
            for start in places:
                for end in self._ends(start, token):
                    way.setdefault(end, start)
            if not way:  # no text of these tokens: the count is as good as it can be
                way[places[0][0] + len(token), 0] = places[0]
            # The furthest first, and of these one at which no character is begun.
            places = sorted(way, key=lambda one: (-one[0], one[1]))[:_MAX_PLACES]
            ways.append(way)
        if not ways:
            return []
        length = len(self._text)
        # What ends with the text, and came from no further than it must.
        place = min(places, key=lambda one: (abs(one[0] - length), ways[-1][one]))
        # Those beyond the text count only while a stop word may hold some of it back.
        self._places = sorted(one for one in places if one[0] >= min(length, place[0]))
        offsets = []
        for way in reversed(ways):
            place = way[place]
            offsets.append(place[0])
        return offsets[::-1]

    def _ends(self, start: _Place, token: str) -> set[_Place]:
        if start[1] == 0 and _BROKEN not in token:  # what most are
            return {(start[0] + len(token), 0)}
        ends = {start}
        for index, char in enumerate(token, start=1):
            is_last = index == len(token)
            ends = {end for one in ends for end in self._steps(one, char, is_last)}
        return ends

    def _steps(self, start: _Place, char: str, is_last: bool) -> Iterator[_Place]:
        """Where one character of a token may lead."""
        at, num_bytes = start
        known = self._text[at : at + 1]
        if num_bytes and known in ("", _BROKEN):
            # It may be complete and not told yet, or never become complete.
            yield from self._steps((at + 1, 0), char, is_last)
        if char != _BROKEN:
            if num_bytes == 0:
                yield at + 1, 0
            return
        size = _MAX_BYTES if known in ("", _BROKEN) else len(known.encode())
        if num_bytes:
            yield (at, num_bytes + 1) if num_bytes + 1 < size else (at + 1, 0)
            return
        if known == _BROKEN:
            yield at + 1, 0
        if is_last:
            for begun in range(1, size):
                yield at, begun
