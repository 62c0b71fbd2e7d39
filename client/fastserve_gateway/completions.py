"""Answers of ``POST /v1/completions``."""

from __future__ import annotations

import codecs
from collections import defaultdict
from typing import Any

from fastserve_client.results import Chunk, Completion, TokenLogprob

from fastserve_gateway.answer import ChoicesAnswer
from fastserve_gateway.schemas import CompletionRequest


class CompletionAnswer(ChoicesAnswer):
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request)
        self._wants_logprobs = request.logprobs is not None
        self._offsets: defaultdict[int, _TextOffsets] = defaultdict(_TextOffsets)
        """The offsets of each choice."""

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._choice(index, completion)

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None:
            return None
        return self._choice(index, chunk)

    def _choice(self, index: int, part: Chunk | Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": part.text,
            "logprobs": self._logprobs(index, part) if self._wants_logprobs else None,
            "finish_reason": part.finish_reason,
        }

    def _logprobs(self, index: int, part: Chunk | Completion) -> dict[str, Any]:
        entries = part.logprobs
        offsets = self._offsets[index]
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_by_text(entry) for entry in entries],
            "text_offset": [offsets.add(entry.utf8) for entry in entries],
        }


class _TextOffsets:
    """Where a text's tokens begin, in characters. Some tokens are parts of a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def add(self, token: bytes) -> int:
        """The next token's offset. A token that continues a character has that one's offset."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return offset


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    """Log-probabilities of the token itself and of the likeliest ones, by text. Parts of characters
    share one text. Of those the token itself stays, or else the likeliest."""
    found: dict[str, float] = {}
    for one in (entry, *entry.top):
        found.setdefault(one.token, one.logprob)
    return found
