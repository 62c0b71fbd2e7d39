"""Which id each token has, by a tokenizer's files.

`tokenizers` numbers added tokens itself: from the number of tokens that the vocabulary has,
whatever the file says. Where a vocabulary has gaps, that is another id, and maybe one that it uses.
Of a token under two ids it forgets one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

Vocabulary = dict[str, int]


def parse(text: str) -> tuple[Any, dict[int, str]]:
    """The value of a JSON file, and by id the tokens that it has under several: a name may come
    twice in an object, of which the last counts."""
    further: dict[int, str] = {}

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            for name, value in pairs:
                if type(value) is int and fields[name] != value:
                    further[value] = name
        return fields

    return json.loads(text, object_pairs_hook=collect), further


def build(
    make: Callable[[Vocabulary], FastTokenizer],
    vocabulary: Vocabulary,
    added: Mapping[int, AddedToken],
    named: Iterable[str],
) -> FastTokenizer:
    """A tokenizer whose added tokens have the ids that its files say.

    Args:
        make: of this vocabulary, with all added tokens.
        added: by id, as the files say.
        named: further tokens, which take the next ids where the vocabulary lacks them.
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
