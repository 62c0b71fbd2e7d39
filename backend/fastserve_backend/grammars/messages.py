"""Typed messages between the engine and the grammars' process, as MessagePack."""

from __future__ import annotations

import msgspec


class Vocabulary(msgspec.Struct, tag="vocabulary", array_like=True):
    """The first message: the model's tokens."""

    tokens: list[bytes]
    """By id; empty for those that have no text."""
    specials: dict[int, bytes]
    """The special tokens by id, as a prompt spells them. Their text in ``tokens`` is empty."""
    eos_token_ids: tuple[int, ...]


class BeginJob(msgspec.Struct, tag="begin", array_like=True):
    """A job whose output must follow a grammar. The message says all about it, so that a fresh
    process can go on with the job."""

    number: int
    kind: str
    text: str
    output_ids: bytes  # int32: the tokens that the job has already
    spells_specials: bool
    """Whether the job's special tokens have text, so that the grammar may allow them."""
    tenant: str
    """Who pays for the masks, and for the check if the grammar is not known yet."""


class AcceptTokens(msgspec.Struct, tag="accept", array_like=True):
    """Some jobs have one more token each."""

    tokens: list[tuple[int, int]]
    """Number of the job, id of the token."""


class EndJob(msgspec.Struct, tag="end", array_like=True):
    """The job is over."""

    number: int


class Mask(msgspec.Struct, array_like=True):
    """Which tokens may come next in a job."""

    number: int
    num_tokens: int
    """Output tokens before the next one. A job that has more by now cannot use the mask."""
    bits: bytes
    """One bit for each token of the vocabulary, the lowest of each byte first, padded to whole
    words of 32 bits."""


class NewMasks(msgspec.Struct, tag="masks", array_like=True):
    """The answer to ``BeginJob``, and to each token."""

    masks: list[Mask]


class GrammarRefused(msgspec.Struct, tag="refused", array_like=True):
    """The answer to ``BeginJob``, where the grammar is invalid or exceeds a limit."""

    number: int
    reason: str


class JobFailed(msgspec.Struct, tag="failed", array_like=True):
    """The answer to a token, where the grammar cannot say what follows within its limits."""

    number: int
    reason: str


class TimeUsed(msgspec.Struct, tag="used", array_like=True):
    """A tenant's grammars have used processor time: for checks, compilations and masks."""

    tenant: str
    seconds: float
    """Of the machine, since the message before: of one core, over the number of cores."""


ToGrammars = Vocabulary | BeginJob | AcceptTokens | EndJob
FromGrammars = NewMasks | GrammarRefused | JobFailed | TimeUsed

to_grammars_decoder = msgspec.msgpack.Decoder(ToGrammars)
from_grammars_decoder = msgspec.msgpack.Decoder(FromGrammars)
