"""Typed messages between the engine and the grammars' process, as MessagePack."""

from __future__ import annotations

import msgspec


class Vocabulary(msgspec.Struct, tag="vocabulary", array_like=True):
    """The first message: the model's tokens."""

    tokens: list[bytes]
    """By id; empty for those that have no text."""
    eos_token_ids: tuple[int, ...]


class Begin(msgspec.Struct, tag="begin", array_like=True):
    """A job whose output a grammar bounds. It says all that there is to know: a fresh process can
    go on with it."""

    number: int
    kind: str
    text: str
    output_ids: bytes  # int32: the tokens that it has already


class Accept(msgspec.Struct, tag="accept", array_like=True):
    """Jobs have one more token each."""

    tokens: list[tuple[int, int]]
    """Number of the job, id of the token."""


class End(msgspec.Struct, tag="end", array_like=True):
    """The job is over."""

    number: int


class Mask(msgspec.Struct, array_like=True):
    """What a job's next token may be."""

    number: int
    num_tokens: int
    """That it follows: it is of no use to a job that has more by now."""
    bits: bytes
    """One for each token of the vocabulary, the lowest of each byte first, in whole words of 32
    bits."""


class Masks(msgspec.Struct, tag="masks", array_like=True):
    """The answer to ``Begin``, and to each token."""

    masks: list[Mask]


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The answer to ``Begin``, where there is no such grammar or it is too much."""

    number: int
    reason: str


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The answer to a token, where the grammar cannot say what follows within its limits."""

    number: int
    reason: str


ToGrammars = Vocabulary | Begin | Accept | End
FromGrammars = Masks | Refused | Failed

encoder = msgspec.msgpack.Encoder()
to_grammars_decoder = msgspec.msgpack.Decoder(ToGrammars)
from_grammars_decoder = msgspec.msgpack.Decoder(FromGrammars)
