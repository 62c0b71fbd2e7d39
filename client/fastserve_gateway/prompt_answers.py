"""What answers say about their prompts: ``prompt_logprobs`` as vLLM writes it, and where the tokens
of a prompt begin in its text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from fastserve_client.results import PromptToken, TokenLogprob


def vllm_prompt_logprobs(
    entries: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, Any] | None]:
    """For each token of the prompt an object by token id: the token itself, and the ``num_top``
    likeliest. ``None`` for the first token."""
    return [None if entry is None else _by_id(entry, num_top) for entry in entries]


def _by_id(entry: TokenLogprob, num_top: int) -> dict[str, Any]:
    found = {str(entry.token_id): _ranked(entry, entry.rank)}
    for rank, one in enumerate(entry.top[:num_top], start=1):
        found.setdefault(str(one.token_id), _ranked(one, rank))
    return found


def _ranked(entry: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": entry.logprob, "rank": rank, "decoded_token": entry.token}


class TextOffsets:
    """Where a text's tokens begin, in characters. Some tokens are parts of a character.

    Args:
        num_chars: characters before the first token.
    """

    def __init__(self, num_chars: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = num_chars

    def add(self, token: bytes) -> int:
        """The next token's offset. A token that continues a character has that one's offset."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return offset


def prompt_offsets(text: bytes, tokens: Sequence[PromptToken]) -> list[int]:
    """Where the prompt's tokens begin in its text, in characters.

    Some tokens are not in the text as they are: the tokenizer has added special tokens, or a space
    before the text. Behind text that it has changed in another way, offsets are near the right
    ones.
    """
    offsets = TextOffsets()
    found, place = [], 0
    for token in tokens:
        end = place + _length_at(text, place, token)
        found.append(offsets.add(text[place:end]))
        place = end
    return found


def _length_at(text: bytes, place: int, token: PromptToken) -> int:
    """Bytes of the text at this place that are the token."""
    without_space = token.utf8.removeprefix(b" ")
    for written in (token.utf8, without_space, (token.special or "").encode()):
        if written and text.startswith(written, place):
            return len(written)
    return 0 if token.special else len(without_space)
