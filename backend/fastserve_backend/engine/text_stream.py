"""From one job's tokens to the text its client may see: incremental, with stop words."""

from __future__ import annotations

from fastserve_backend.models.tokenizer import TokenStream


class TextStream:
    """Text that could still become a stop word is held back until it is clear that it does not.

    Stop words are found across token boundaries and are not part of the text.
    """

    def __init__(self, tokens: TokenStream, stop_words: tuple[str, ...]) -> None:
        self._tokens = tokens
        self._stop_words = stop_words
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """The text that this token releases, and whether a stop word is complete.

        ``may_stop`` False (below ``min_tokens``) lets a stop word through as ordinary text.
        """
        piece = self._tokens.step(token_id)
        if not self._stop_words:
            return piece, False
        text = self._held + piece
        if may_stop:
            found = [at for word in self._stop_words if (at := text.find(word)) >= 0]
            if found:
                self._held = ""
                return text[: min(found)], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What is left when the job ends for another reason than a stop word."""
        text = self._held + self._tokens.flush()
        self._held = ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop word."""
        longest = max(len(word) for word in self._stop_words) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(word.startswith(end) for word in self._stop_words):
                return length
        return 0
