"""The vocabulary of a GGUF file: its tokens, by id, and the kind of each."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.limits import TOKEN_CHARS, VOCABULARY_CHARS, check

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # GGUF's names for kinds of vocabularies
# GGUF's types of added tokens, which are looked for in a text before all others.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_UNUSED = 5

NO_TOKEN = (None, -1, 2**32 - 1)
"""The values of a special token's id field if there is no such token."""


class Fields(Protocol):
    """The metadata of a GGUF file."""

    def field(self, key: str, default: Any = None) -> Any: ...

    def required(self, key: str) -> Any: ...


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokens of a file, by id, and the kind of each."""

    kind: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    """Ids by token, in ascending order. If a token has several ids, it is the one with a special
    name, else an added token's, else the last, as in llama.cpp."""

    @classmethod
    def of(cls, file: Fields) -> GGUFVocabulary:
        kind = file.field("tokenizer.ggml.model")
        if kind not in (BYTE_LEVEL, SENTENCEPIECE):
            raise ModelError(
                f"tokenizer.ggml.model is {kind!r}; known are {BYTE_LEVEL} and {SENTENCEPIECE}; "
                "use the model's Hugging Face checkpoint"
            )
        tokens = file.required("tokenizer.ggml.tokens")
        for index, token in enumerate(tokens):
            check(f"token {index}: its number of characters", len(token), TOKEN_CHARS)
        check("the number of characters of all tokens", sum(map(len, tokens)), VOCABULARY_CHARS)
        types = file.required("tokenizer.ggml.token_type")
        if len(types) != len(tokens):
            raise ModelError(
                f"metadata field tokenizer.ggml.token_type has {len(types)} values, but there are "
                f"{len(tokens)} tokens"
            )
        named = {_named_id(file, name) for name in ("bos", "eos", "unknown")}

        def precedence(token_id: int) -> tuple[bool, bool, bool]:
            kind = types[token_id]
            return token_id in named, kind in _ADDED, kind != _UNUSED

        ordered = sorted(range(len(tokens)), key=precedence)
        chosen = {tokens[token_id]: token_id for token_id in ordered}
        return cls(kind, tokens, types, dict(sorted(chosen.items(), key=itemgetter(1))))

    def is_added(self, token_id: int) -> bool:
        """Whether it is looked for in a text before all others."""
        return self.types[token_id] in _ADDED

    def is_special(self, token_id: int) -> bool:
        return self.types[token_id] in (_UNKNOWN, _CONTROL)

    def named(self, file: Fields, name: str) -> str | None:
        """The special token that GGUF calls `name`; None if the file has none."""
        token_id = _named_id(file, name)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(f"its special token {token_id} is not in the vocabulary")
        return self.tokens[token_id]

    def duplicates(self) -> dict[str, Any]:
        """Tokens by their second ids: an added token as an object, any other as text.

        tokenizer.json lists each token once, so these ids would have no text.
        """
        return {
            str(token_id): {"content": token, "special": self.is_special(token_id)}
            if self.is_added(token_id)
            else token
            for token_id, token in enumerate(self.tokens)
            if self.ids[token] != token_id
        }


def _named_id(file: Fields, name: str) -> int | None:
    token_id: int | None = file.field(f"tokenizer.ggml.{name}_token_id")
    return None if token_id in NO_TOKEN else token_id
