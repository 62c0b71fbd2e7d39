"""The vocabulary of a GGUF file: its tokens, by id, and the kind of each."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

from fastserve_backend.checkpoints.errors import ModelError

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # GGUF's names of the kinds of vocabularies
# Its types of tokens that are found in a text before all others.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_UNUSED = 5

NO_TOKEN = (None, -1, 2**32 - 1)
"""What fields with the id of a special token hold where there is none."""


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
    """In their order. Of a token with several, that which has a name, else one that was added, else
    the last, as in llama.cpp."""

    @classmethod
    def of(cls, file: Fields) -> GGUFVocabulary:
        kind = file.field("tokenizer.ggml.model")
        if kind not in (BYTE_LEVEL, SENTENCEPIECE):
            raise ModelError(
                f"tokenizer.ggml.model is {kind!r}; known are {BYTE_LEVEL} and {SENTENCEPIECE}; "
                "use the model's Hugging Face checkpoint"
            )
        tokens = file.required("tokenizer.ggml.tokens")
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
        """Whether it is found in a text before all others."""
        return self.types[token_id] in _ADDED

    def is_special(self, token_id: int) -> bool:
        return self.types[token_id] in (_UNKNOWN, _CONTROL)

    def named(self, file: Fields, name: str) -> str | None:
        """The special token of that name in GGUF; None where the file has none."""
        token_id = _named_id(file, name)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(f"its special token {token_id} is not in the vocabulary")
        return self.tokens[token_id]

    def duplicates(self) -> dict[str, Any]:
        """Tokens by the ids that they have besides: those that were added as objects, others as
        text. tokenizer.json has each token once, so that these ids would be without text."""
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
