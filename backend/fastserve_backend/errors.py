"""Errors that reach users. Each message names the field, what was given and what to do."""

from __future__ import annotations

import math


class FastServeError(Exception):
    """Base of every error that a user or an operator can cause or see."""


class ConfigError(FastServeError):
    """The configuration cannot be used. The message lists all problems."""


class InvalidRequestError(FastServeError):
    """A request is malformed, or asks for more than this server has (Triton code INVALID_ARG).

    Attributes:
        field: name of the offending field, as the client sends it.
    """

    def __init__(self, field: str, given: object, allowed: str) -> None:
        # The client may have made up the field's name too.
        shown = _shorten(field if field.isprintable() else repr(field))
        super().__init__(f"{shown}: got {_shorten(repr(given))}; {allowed}")
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Prompt and output together exceed the tokens that this server can take.

    The words, with their capital, are those of OpenAI's API, because its clients look for them.

    Args:
        limit: most tokens of prompt and output together.
        remedy: what the limit means for ``field``.
    """

    def __init__(self, field: str, given: object, limit: int, remedy: str) -> None:
        words = f"This model's maximum context length is {limit} tokens"
        super().__init__(field, given, f"{words}, {remedy}")


class OverloadedError(FastServeError):
    """The queue is full; another try later may succeed (Triton code UNAVAILABLE)."""


class TenantLimitError(OverloadedError):
    """One tenant is at a limit of its own. The server takes requests of others.

    The message ends with "; try again in N s", by which clients know the time.

    Attributes:
        retry_after_s: when the request is likely to fit, in seconds.
    """

    def __init__(self, tenant: str, reason: str, retry_after_s: float) -> None:
        shown = _shorten(repr(tenant))
        wait_s = max(1, math.ceil(retry_after_s))
        super().__init__(f"tenant {shown} {reason}; try again in {wait_s} s")
        self.retry_after_s = retry_after_s


class DrainingError(FastServeError):
    """The server finishes its accepted jobs and takes no new ones (Triton code UNAVAILABLE)."""


class EngineError(FastServeError):
    """The engine or one of its ranks is broken (Triton code INTERNAL)."""


# Characters of a rejected value that an error quotes: enough to recognise it.
_MAX_SHOWN_CHARS = 80


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
