"""What a client gets back: chunks of a stream, and whole completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its log-probability (natural logarithm)."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this place, best first, as many as were asked for."""
    part: bytes | None = None
    """The UTF-8 bytes of a token that is a part of a character; ``token`` then shows U+FFFD."""
    rank: int | None = None
    """1 if no token is likelier, and so on; only for tokens of the prompt."""

    @property
    def utf8(self) -> bytes:
        """The bytes that it adds to the text."""
        return self.token.encode() if self.part is None else self.part


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt."""

    token_id: int
    token: str
    """Its text; empty for a special token."""
    part: bytes | None = None
    """As in ``TokenLogprob``."""
    special: str | None = None
    """How a prompt spells a special token; ``None`` for other tokens."""

    @property
    def utf8(self) -> bytes:
        """The bytes of its text."""
        return self.token.encode() if self.part is None else self.part


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """The server's view of one job.

    Times are nanoseconds since the Unix epoch on the server's clock. 0 means that the event did not
    happen. Subtract them from one another, not from the client's clock.
    """

    arrival_time_ns: int
    first_scheduled_time_ns: int
    first_token_time_ns: int
    last_token_time_ns: int
    num_preemptions: int
    num_swaps: int
    queue_level: int
    """Queue of the job when it ended; 0 is the highest."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text and tokens since the chunk before."""

    text: str
    """May be empty, while a character or a possible stop word is incomplete."""
    token_ids: tuple[int, ...]
    """More than one with the server's ``stream_interval``, or if it merged responses."""
    finish_reason: str | None = None
    """``stop`` or ``length``; set on the last chunk only."""
    num_input_tokens: int | None = None
    """Tokens of the prompt; set on the last chunk only."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each token of ``token_ids``, if the request asked for them."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, if the request asked for ``logprobs``."""
    perf: PerfMetrics | None = None
    """On the last chunk, if the request asked for it."""
    num_cached_tokens: int | None = field(default=None, compare=False)
    """Tokens of the prompt that other requests had computed; on the last chunk. Comparing chunks
    ignores it."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """On the first chunk, if the request asked for them: one entry for each token of the prompt;
    ``None`` for the first, which nothing comes before."""
    prompt_tokens: tuple[PromptToken, ...] = ()
    """On the first chunk, if the request asked for them."""


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The tokens of a text or of a conversation."""

    token_ids: tuple[int, ...]
    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    token_strs: tuple[str, ...] | None = None
    """The text of each token, if the request asked for it: a special token by its name, and U+FFFD
    for a part of a character."""

    @property
    def count(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation, without the prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    """``None`` if the chunks end before the job does, as after the client's own cancellation."""
    num_input_tokens: int | None
    logprobs: tuple[TokenLogprob, ...]
    cumulative_logprob: float | None
    perf: PerfMetrics | None
    num_cached_tokens: int | None = field(compare=False)
    """Comparing completions ignores it."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """As in ``Chunk``."""
    prompt_tokens: tuple[PromptToken, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def from_chunks(cls, chunks: Iterable[Chunk]) -> Completion:
        """Joins the chunks of one stream, in order."""
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        first: Chunk | None = None
        last = Chunk(text="", token_ids=())
        for chunk in chunks:
            first = first or chunk
            texts.append(chunk.text)
            token_ids.extend(chunk.token_ids)
            logprobs.extend(chunk.logprobs)
            last = chunk
        return cls(
            text="".join(texts),
            token_ids=tuple(token_ids),
            finish_reason=last.finish_reason,
            num_input_tokens=last.num_input_tokens,
            logprobs=tuple(logprobs),
            cumulative_logprob=last.cumulative_logprob,
            perf=last.perf,
            num_cached_tokens=last.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs if first else (),
            prompt_tokens=first.prompt_tokens if first else (),
        )
