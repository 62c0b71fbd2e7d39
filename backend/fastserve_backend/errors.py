"""Errors that reach users. Each message names the field, what was given and what to do."""

from __future__ import annotations


class FastServeError(Exception):
    """Base of every error that a user or an operator can cause or see."""


class ConfigError(FastServeError):
    """The configuration is not usable. The message lists every problem found."""


class InvalidRequestError(FastServeError):
    """A request is malformed or asks for more than this server has (Triton code INVALID_ARG).

    Attributes:
        field: name of the offending field, as the client sends it.
    """

    def __init__(self, field: str, given: object, allowed: str) -> None:
        # A client may have made up the field too.
        shown = _shorten(field if field.isprintable() else repr(field))
        super().__init__(f"{shown}: got {_shorten(repr(given))}; {allowed}")
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Prompt and output are more tokens than this server can ever take together.

    The words are those of OpenAI's API, with their capital: its clients look for them.

    Args:
        limit: tokens of prompt and output together.
        remedy: what follows from it for ``field``.
    """

    def __init__(self, field: str, given: object, limit: int, remedy: str) -> None:
        words = f"This model's maximum context length is {limit} tokens"
        super().__init__(field, given, f"{words}, {remedy}")


class OverloadedError(FastServeError):
    """The queue is full; trying again later can succeed (Triton code UNAVAILABLE)."""


class DrainingError(FastServeError):
    """The server finishes its accepted jobs and takes no new one (Triton code UNAVAILABLE)."""


class EngineError(FastServeError):
    """The engine or one of its ranks is broken (Triton code INTERNAL)."""


# What is rejected is quoted back so that the caller recognises it; more would flood a log line.
_MAX_SHOWN_CHARS = 80


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
