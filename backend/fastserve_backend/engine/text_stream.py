"""Turn one job's tokens into text, token by token, and find stop words in it."""

from __future__ import annotations

from collections.abc import Sequence

from fastserve_backend.checkpoints.tokenizer import Tokenizer
from fastserve_backend.engine.unstopped_span import UnstoppedSpan
from fastserve_backend.sampling_params import MAX_STOP_WORD_CHARS

# Text is held back for the longest stop word at most, and a character has at most four tokens.
_RESUMED_TOKENS = 4 * MAX_STOP_WORD_CHARS


class TextStream:
    """The text of one job. Text that may be the beginning of a stop word is held back.

    Stop words are found across token boundaries, and are not part of the text. A special token has
    no text, but a stop word may name it. So there are two searches: one in the plain text, and one
    in the text with the named special tokens spelled out.

    Args:
        stop_words: none of them empty.
        skip_special_tokens: False: a special token has its text, except where it ends the job.
        stop_not_between: the marks of an ``UnstoppedSpan``; empty: there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        stop_not_between: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._skips_specials = skip_special_tokens
        self._held = ""
        self._span = UnstoppedSpan(*stop_not_between) if stop_words and stop_not_between else None
        self._plain = _Search(stop_words) if stop_words else None
        specials = set(tokenizer.specials.values()) if stop_words else set()
        self._named = {one for one in specials if any(one in word for word in stop_words)}
        # Only stop words that name a special token are searched for in the spelled-out text. Others
        # would be found inside one, such as ">" in "</s>".
        spelled = [word for word in stop_words if any(one in word for one in self._named)]
        self._spelled = _Search(spelled) if spelled else None
        self._searches = [one for one in (self._plain, self._spelled) if one is not None]

    def resume(self, token_ids: Sequence[int]) -> None:
        """The text goes on behind these tokens. The client has their text, but for what was held
        back. None of them completes a stop word that counts."""
        num_skipped = max(0, len(token_ids) - _RESUMED_TOKENS)
        # The marks of a span may be anywhere.
        begin = num_skipped if self._span is None else 0
        for index in range(begin, len(token_ids)):
            piece = self._tokens.step(token_ids[index])
            self._stop_counts(piece)
            if index >= num_skipped:
                self._append(token_ids[index], piece, is_end=False)
        if self._searches:
            length = max(search.find(may_stop=False)[1] for search in self._searches)
            self._held = self._held[len(self._held) - length :]

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
        may_stop &= self._stop_counts(piece)
        self._append(token_id, piece, is_end=is_end)
        matches = [search.find(may_stop=may_stop) for search in self._searches]
        stops = any(is_whole for is_whole, _ in matches)
        length = max(length for is_whole, length in matches if is_whole == stops)
        released = self._held[: len(self._held) - length]
        self._held = "" if stops else self._held[len(self._held) - length :]
        return released, stops

    def _stop_counts(self, piece: str) -> bool:
        """Whether stop words count in the next piece of the text."""
        return self._span is None or self._span.append(piece)

    def _append(self, token_id: int, piece: str, *, is_end: bool) -> None:
        """Hold back the token's text, and let the searches have it."""
        if self._plain is None:
            return
        self._held += piece
        text = self._tokenizer.decode([token_id]) if is_end else piece
        self._plain.append(text, is_seen=not is_end)
        if self._spelled is not None:
            special = self._tokenizer.specials.get(token_id, "")
            is_hidden = special in self._named and (is_end or self._skips_specials)
            text = special if is_hidden else text
            self._spelled.append(text, is_seen=not (is_end or is_hidden))

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

    def append(self, text: str, *, is_seen: bool) -> None:
        self._text += text
        self._seen += ("1" if is_seen else "0") * len(text)

    def find(self, *, may_stop: bool) -> tuple[bool, int]:
        """Whether a stop word is complete, and the number of visible characters since its
        beginning. If none is complete: since the earliest place where one may have begun.
        """
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
