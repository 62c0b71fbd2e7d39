"""Turn one job's tokens into text, token by token, and find stop words in it."""

from __future__ import annotations

from collections.abc import Sequence

from fastserve_backend.checkpoints.tokenizer import Tokenizer


class TextStream:
    """The text of one job. Text that may be the beginning of a stop word is held back.

    Stop words are found across token boundaries, and are not part of the text. A special token has
    no text, but a stop word may name it. So there are two searches: one in the plain text, and one
    in the text with the named special tokens spelled out.

    Args:
        stop_words: none of them empty.
        skip_special_tokens: False: a special token has its text, except where it ends the job.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: Sequence[str],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._skips_specials = skip_special_tokens
        self._held = ""
        self._plain = _Search(stop_words) if stop_words else None
        specials = set(tokenizer.specials.values()) if stop_words else set()
        self._named = {one for one in specials if any(one in word for word in stop_words)}
        # Only stop words that name a special token are searched for in the spelled-out text. Others
        # would be found inside one, such as ">" in "</s>".
        spelled = [word for word in stop_words if any(one in word for one in self._named)]
        self._spelled = _Search(spelled) if spelled else None

    def push(self, token_id: int, *, may_stop: bool, is_end: bool = False) -> tuple[str, bool]:
        """The text that this token releases, and whether it completes a stop word.

        Args:
            may_stop: False treats stop words as ordinary text (below ``min_tokens``).
            is_end: whether the job ends with this token. Then it has no text, but may complete a
                stop word.
        """
        piece = "" if is_end else self._tokens.step(token_id)
        if self._plain is None:
            return piece, False
        self._held += piece
        text = self._tokenizer.decode([token_id]) if is_end else piece
        matches = [self._plain.add(text, is_seen=not is_end, may_stop=may_stop)]
        if self._spelled is not None:
            special = self._tokenizer.specials.get(token_id, "")
            is_hidden = special in self._named and (is_end or self._skips_specials)
            text = special if is_hidden else text
            is_seen = not (is_end or is_hidden)
            matches.append(self._spelled.add(text, is_seen=is_seen, may_stop=may_stop))
        stops = any(is_whole for is_whole, _ in matches)
        length = max(length for is_whole, length in matches if is_whole == stops)
        released = self._held[: len(self._held) - length]
        self._held = "" if stops else self._held[len(self._held) - length :]
        return released, stops

    def finish(self) -> str:
        """The text held back so far, if the job ends for another reason than a stop word."""
        text = self._held + self._tokens.flush()
        self._held = ""
        return text


class _Search:
    """Searches a growing text for stop words. Keeps its end, from where one may begin."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._longest = max(map(len, words))
        self._text = ""
        self._seen = ""
        """For each character of ``_text``: "1" if the client would see it, else "0"."""

    def add(self, text: str, *, is_seen: bool, may_stop: bool) -> tuple[bool, int]:
        """Append text.

        Returns whether a stop word is complete, and the number of visible characters since its
        beginning. If none is complete: since the earliest place where one may have begun.
        """
        self._text += text
        self._seen += ("1" if is_seen else "0") * len(text)
        found: list[int] = []
        if may_stop:
            found = [at for word in self._words if (at := self._text.find(word)) >= 0]
        begin = min(found, default=len(self._text) - self._possible_start())
        self._text, self._seen = self._text[begin:], self._seen[begin:]
        return bool(found), self._seen.count("1")

    def _possible_start(self) -> int:
        """Length of the longest end of the text that a stop word begins with."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(word.startswith(end) for word in self._words):
                return length
        return 0
