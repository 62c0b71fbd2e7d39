"""From one job's tokens to the text its client may see: incremental, with stop words."""

from __future__ import annotations

from collections.abc import Sequence

from fastserve_backend.checkpoints.tokenizer import Tokenizer


class TextStream:
    """Text that could still become a stop word is held back until it is clear that it does not.

    Stop words are found across token boundaries and are not part of the text. A special token has
    no text, but a stop word may name it: so stop words are also looked for in the text in which the
    special tokens that they name are spelled out.

    Args:
        stop_words: none of them empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop_words: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokenizer.stream()
        self._held = ""
        self._plain = _Search(stop_words) if stop_words else None
        specials = set(tokenizer.specials.values()) if stop_words else set()
        self._named = {one for one in specials if any(one in word for word in stop_words)}
        # Other words would be found inside a special token, such as ">" in "</s>".
        spelled = [word for word in stop_words if any(one in word for one in self._named)]
        self._spelled = _Search(spelled) if spelled else None

    def push(self, token_id: int, *, may_stop: bool, is_end: bool = False) -> tuple[str, bool]:
        """The text that this token releases, and whether a stop word is complete.

        Args:
            may_stop: False (below ``min_tokens``) lets a stop word through as ordinary text.
            is_end: the job ends with this token, which then has no text, but may complete a stop
                word.
        """
        piece = "" if is_end else self._tokens.step(token_id)
        if self._plain is None:
            return piece, False
        self._held += piece
        text = self._tokenizer.decode([token_id]) if is_end else piece
        matches = [self._plain.add(text, is_seen=not is_end, may_stop=may_stop)]
        if self._spelled is not None:
            special = self._tokenizer.specials.get(token_id, "")
            is_named = special in self._named
            text = special if is_named else text
            is_seen = not (is_end or is_named)
            matches.append(self._spelled.add(text, is_seen=is_seen, may_stop=may_stop))
        stops = any(is_whole for is_whole, _ in matches)
        length = max(length for is_whole, length in matches if is_whole == stops)
        released = self._held[: len(self._held) - length]
        self._held = "" if stops else self._held[len(self._held) - length :]
        return released, stops

    def finish(self) -> str:
        """What is left when the job ends for another reason than a stop word."""
        text = self._held + self._tokens.flush()
        self._held = ""
        return text


class _Search:
    """The end of a growing text, from where a stop word may have begun."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._longest = max(map(len, words))
        self._text = ""
        self._seen = ""
        """For each character of the text "1" if the client sees it, else "0"."""

    def add(self, text: str, *, is_seen: bool, may_stop: bool) -> tuple[bool, int]:
        """Whether a stop word is complete, and how many characters that the client sees the text
        has from its beginning on, or from where one may begin."""
        self._text += text
        self._seen += ("1" if is_seen else "0") * len(text)
        found: list[int] = []
        if may_stop:
            found = [at for word in self._words if (at := self._text.find(word)) >= 0]
        begin = min(found, default=len(self._text) - self._possible_start())
        self._text, self._seen = self._text[begin:], self._seen[begin:]
        return bool(found), self._seen.count("1")

    def _possible_start(self) -> int:
        """Length of the longest end of the text that begins a stop word."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(word.startswith(end) for word in self._words):
                return length
        return 0
