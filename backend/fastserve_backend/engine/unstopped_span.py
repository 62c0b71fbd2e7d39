"""The beginning of an answer in which stop words do not count, such as a model's reasoning."""

from __future__ import annotations


class UnstoppedSpan:
    """Follows a growing text: a span between two marks, if it begins with the first of them.

    Args:
        opening: with white space before it, or none; empty: the span begins with the text.
        closing: not empty.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._is_inside = not opening
        self._text = ""
        """What may still become a mark."""
        self.is_over = False

    def append(self, piece: str) -> bool:
        """Whether stop words count in the next piece of the text. They do not in the piece that
        ends the span."""
        if self.is_over:
            return True
        self._text += piece
        if not self._is_inside:
            text = self._text.lstrip()
            if not text.startswith(self._opening):
                self.is_over = not self._opening.startswith(text)
                return self.is_over
            self._is_inside = True
            self._text = text.removeprefix(self._opening)
        self.is_over = self._closing in self._text
        self._text = self._text[max(0, len(self._text) - len(self._closing) + 1) :]
        return False
