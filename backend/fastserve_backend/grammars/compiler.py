"""Compiles what a client asks for to a matcher of llguidance.

vLLM, SGLang and llama.cpp use https://github.com/guidance-ai/llguidance too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastserve_client.schema_formats import without_unknown
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Beyond these limits a mask would take tens of milliseconds, or a matcher tens of megabytes. The
# job fails instead. Rows have about four items for each optional property of a JSON object.
_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    step_max_items=20_000,
    step_lexer_fuel=100_000,
    max_lexer_states=10_000,
    verbose_errors=False,
)
# Allowed between the parts of a JSON text: a line break and its indentation. Without a limit, small
# models would write white space for ever.
_WHITE_SPACE = r"[ \n\t]{0,24}"
_MAX_REASON_CHARS = 300
_NOTHING_MATCHES = "NoExtension"
_OWN_STATE = re.compile(r"<(?:backtrace|state|non-verbose/|grammar)>")


class GrammarError(Exception):
    """The grammar is invalid or exceeds a limit; the message says why, in one line."""


class Compiler:
    """Compiles grammars for one vocabulary.

    Args:
        tokens: the bytes of each token, by id. Tokens without bytes are never allowed, except the
            end-of-sequence tokens, which are allowed where an answer may end.
        eos_token_ids: at least one.
    """

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        # An end token always ends the answer, so its text must not be part of a string.
        ends = set(eos_token_ids)
        tokens = [b"" if one in ends else token for one, token in enumerate(tokens)]
        wrapper = TokenizerWrapper(_Vocabulary(tokens, eos_token_ids[0]))
        self._tokenizer = LLTokenizer(wrapper, eos_token=list(eos_token_ids))
        self._mask_bytes = 4 * -(-len(tokens) // 32)

    def compile(self, kind: str, text: str) -> LLMatcher:
        """A matcher of the whole answer. It computes the first mask, to be sure that it can.

        Mostly this takes a millisecond. Some grammars never end, or take all memory or all of the
        stack: see ``Check``.

        Raises:
            GrammarError: the grammar is invalid or exceeds a limit.
        """
        try:
            grammar = _grammar(kind, text)
        except ValueError as error:
            raise GrammarError(_reason(str(error))) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        self.next_mask(matcher)
        return matcher

    def next_mask(self, matcher: LLMatcher) -> bytes:
        """Which tokens may come next, as bits: see ``Mask``.

        Raises:
            GrammarError: no token may, or computing the mask exceeds a limit.
        """
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return mask[: self._mask_bytes]  # llguidance has a bit more than there are tokens


def accept(matcher: LLMatcher, token_id: int) -> None:
    """Continue the answer with this token.

    Raises:
        GrammarError: the grammar does not allow it.
    """
    if not matcher.consume_token(token_id):
        raise GrammarError(_reason(matcher.get_error()))


class _Vocabulary:
    """The parts of a tokenizer that llguidance needs."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        # Of tokens with the same bytes, the first.
        self._ids = {token: n for n, token in reversed(list(enumerate(tokens))) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Splits a text that the grammar forces, always into the longest token. The model's own
        tokenizer may split it differently, but would also see special tokens in it."""
        found, begin = [], 0
        while begin < len(text):
            for end in range(min(len(text), begin + self._longest), begin, -1):
                token_id = self._ids.get(text[begin:end])
                if token_id is not None:
                    found.append(token_id)
                    begin = end
                    break
            else:
                break  # the vocabulary cannot spell it
        return found


def _grammar(kind: str, text: str) -> str:
    if kind in ("json_schema", "json_object"):
        schema = without_unknown(json.loads(text))
        options: JsonCompileOptions = {"whitespace_pattern": _WHITE_SPACE}
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if kind == "regex":
        # Otherwise \d would match any digit of Unicode.
        return f"start: /{regex_to_lark(text, use_ascii='d')}/"
    if kind == "choice":
        # All choices are one lexeme, because the number of a grammar's alternatives is limited.
        choices = (json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return "start: CHOICE\nCHOICE: " + " | ".join(choices)
    return LLMatcher.grammar_from_lark(text)


def _reason(message: str) -> str:
    """The message on one line, without llguidance's internal state."""
    if message.startswith(_NOTHING_MATCHES):
        return "nothing matches it"
    reason = " ".join(_OWN_STATE.split(message)[0].split())
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + "…"
