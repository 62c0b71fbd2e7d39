"""Gives each token the id that a tokenizer's files give it.

`tokenizers` numbers added tokens itself, starting at the vocabulary's size, whatever the file says.
If the vocabulary has gaps, such an id is wrong and perhaps in use. If a token has two ids,
`tokenizers` forgets one. Also says which tokens come around a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as FastTokenizer

Vocabulary = dict[str, int]


def parse_with_duplicates(text: str) -> tuple[Any, dict[int, str]]:
    """The value of a JSON text, and the names that an object has more than once, by their earlier
    numbers (the last one is in the value)."""
    further: dict[int, str] = {}

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            for name, value in pairs:
                if type(value) is int and fields[name] != value:
                    further[value] = name
        return fields

    return json.loads(text, object_pairs_hook=collect), further


def build_tokenizer(
    make: Callable[[Vocabulary], FastTokenizer],
    vocabulary: Vocabulary,
    added: Mapping[int, AddedToken],
    named: Iterable[str],
) -> FastTokenizer:
    """A tokenizer whose added tokens have the ids of its files.

    Args:
        make: makes a tokenizer from a vocabulary, with all added tokens.
        added: added tokens by their ids in the files.
        named: more tokens. Those that the vocabulary lacks get the next ids.
    """
    placed: Vocabulary = {}
    for token_id, token in added.items():
        if token.content not in vocabulary:
            placed.setdefault(token.content, token_id)
    next_id = max((*vocabulary.values(), *added), default=-1) + 1
    for text in named:
        if text not in vocabulary and text not in placed:
            placed[text] = next_id
            next_id += 1
    fast = make(vocabulary)
    if all(fast.token_to_id(text) == token_id for text, token_id in placed.items()):
        return fast
    # An added token that the vocabulary has keeps its id.
    return make(vocabulary | placed)


def around_prompt(
    fast: FastTokenizer, begin: str | None, end: str | None
) -> processors.PostProcessor:
    """Puts these tokens before and after a prompt; None: no token."""
    around = dict.fromkeys(token for token in (begin, end) if token is not None)
    return processors.TemplateProcessing(
        single=[token for token in (begin, "$A", end) if token is not None],
        special_tokens=[(token, fast.token_to_id(token)) for token in around],
    )
