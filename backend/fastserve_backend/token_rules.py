"""Which tokens an answer may have, by a request's ``allowed_token_ids`` and ``bad_words``."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastserve_backend.errors import FastServeError, InvalidRequestError
from fastserve_backend.grammars.structured_output import FIELD
from fastserve_backend.sampling_params import SamplingParams

if TYPE_CHECKING:  # the simulator has jobs, and needs neither
    from fastserve_backend.checkpoints.model_config import ModelConfig
    from fastserve_backend.checkpoints.tokenizer import Tokenizer


class TokenRules:
    """The rules of one job. They do not change.

    Args:
        vocab_size: of the model.
        allowed: no other tokens may be chosen; None: all may.
        bad_words: sequences of at least one token that the answer must not contain.
        early_ends: tokens that end the answer. They are banned before it has ``min_tokens``.
    """

    def __init__(
        self,
        vocab_size: int,
        allowed: Collection[int] | None,
        bad_words: Iterable[Sequence[int]],
        early_ends: Collection[int],
        min_tokens: int,
    ) -> None:
        self.allowed = None if allowed is None else _mask(vocab_size, allowed)
        """As bits (``Sampling.masks``)."""
        self._last_tokens: dict[tuple[int, ...], set[int]] = {}
        """The last tokens of bad words, by the tokens before them."""
        for word in bad_words:
            self._last_tokens.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self._lengths = sorted(set(map(len, self._last_tokens)))
        self._early_ends = early_ends
        self._min_tokens = min_tokens

    @classmethod
    def of(
        cls, params: SamplingParams, tokenizer: Tokenizer, model: ModelConfig
    ) -> TokenRules | None:
        """The rules of a request; None: it has none.

        Raises:
            InvalidRequestError: a bad word has no tokens, or no answer could begin or end.
        """
        allowed, ends = params.allowed_token_ids, model.eos_token_ids
        if allowed is None and not params.bad_words:
            return None
        rules = cls(
            model.vocab_size,
            allowed,
            [ids for word in params.bad_words for ids in _spellings(word, tokenizer)],
            {*params.stop_token_ids, *(() if params.ignore_eos else ends)},
            params.min_tokens,
        )
        if allowed is None or rules.allowed is None:
            return rules
        remedy = None
        if params.structured_output is None:
            if not rules.leave_choice(rules.allowed, array("i")):
                remedy = "bad_words or min_tokens ban all of them; allow another token"
        elif not any(one in allowed for one in ends):
            remedy = f"with {FIELD} one of them must be an end token, such as {ends[0]}"
        if remedy is not None:
            raise InvalidRequestError("allowed_token_ids", f"{len(allowed)} token ids", remedy)
        return rules

    @property
    def depend_on_output(self) -> bool:
        """Whether other tokens are banned after other tokens."""
        return bool(self._lengths) and self._lengths[-1] > 0

    def banned_after(self, output_ids: array[int]) -> set[int]:
        """The tokens that would complete a bad word."""
        banned: set[int] = set()
        for length in self._lengths:
            if length > len(output_ids):
                break
            before = tuple(output_ids[len(output_ids) - length :])
            banned |= self._last_tokens.get(before, set())
        return banned

    def narrow(self, mask: bytes) -> bytes:
        """The mask without the tokens that are not allowed."""
        if self.allowed is None:
            return mask
        both = np.frombuffer(mask, np.uint8) & np.frombuffer(self.allowed, np.uint8)
        return both.tobytes()

    def leave_choice(self, mask: bytes, output_ids: array[int]) -> bool:
        """Whether the mask allows a token that may follow ``output_ids``."""
        banned = self.banned_after(output_ids)
        if len(output_ids) < self._min_tokens:
            banned.update(self._early_ends)
        bits = np.frombuffer(mask, np.uint8).copy()
        for token_id in banned:
            bits[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
        return bool(bits.any())


def _spellings(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of a bad word, with and without a space before it."""
    bare = word.lstrip(" ") or word
    try:
        plain, spaced = (
            tokenizer.encode(text, special_tokens=False) for text in (bare, f" {bare}")
        )
    except FastServeError as error:
        raise InvalidRequestError("bad_words", word, str(error)) from None
    if not plain:
        raise InvalidRequestError("bad_words", word, "must give at least one token")
    # The longer one adds nothing if it ends with the other.
    return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]


def _mask(vocab_size: int, token_ids: Collection[int]) -> bytes:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").tobytes()
