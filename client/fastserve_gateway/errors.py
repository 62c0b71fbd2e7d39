"""Errors in the JSON shapes of OpenAI and Anthropic, and how the client's errors map to them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastserve_client import protocol
from fastserve_client.errors import (
    NAMES_FIELD,
    ClientClosed,
    ClientError,
    ContextLengthExceeded,
    InvalidRequest,
    RequestTimeout,
    ServerOverloaded,
    ServerUnavailable,
)
from fastserve_client.validation_words import what_is_allowed
from pydantic import ValidationError
from starlette.responses import JSONResponse

from fastserve_gateway.shown_values import shown_value
from fastserve_gateway.strict_fields import MAX_NAME_CHARS

logger = logging.getLogger(__name__)

_MAX_MODEL_CHARS = 80

RETRY_AFTER_S = 1
"""Under load a job ends, and frees a place in the queue, about once in this time."""


class ApiError(Exception):
    """An answer instead of a result.

    Args:
        status: the HTTP status.
        message: one line for a person. It quotes no prompt and no key.
        param: the request's field that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }
        """In OpenAI's shape."""

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """In Anthropic's shape."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        message = _anthropic_words(str(self))
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str) -> JSONResponse:
        """The answer to a request for ``path``."""
        is_anthropic = path.startswith(MESSAGES_PATH)
        body = self.anthropic_body if is_anthropic else self.body
        return JSONResponse(body, self.status, self.headers)


MESSAGES_PATH = "/v1/messages"
"""The routes of Anthropic's API begin with it."""
_TYPES = {401: "authentication_error", 429: "rate_limit_error"} | dict.fromkeys(
    (500, 503), "server_error"
)
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
}

# The wording of gRPC and of HTTP.
_TOO_LARGE = re.compile(r"\b(larger than max|too large)\b", re.IGNORECASE)

SERVER_FIELDS = {
    protocol.TEXT_INPUT: "prompt",
    protocol.INPUT_IDS: "prompt",
    protocol.STOP_WORDS: "stop",
    **protocol.SLO_HEADERS,
}
"""The server's field → the field of completions, where they differ."""

_GRAMMAR = f"{protocol.STRUCTURED_OUTPUT}.grammar"
# What the server says about a schema inside a grammar, whose text it quotes before and behind.
_ABOUT_SCHEMA = re.compile(
    r"got .*; at \d+\(\d+\): failed to compile JSON schema: (.*?)(?: 1 \| .*)?", re.DOTALL
)


_TOO_LONG = re.compile(
    r"got '(\d+) (tokens|characters)'; This model's maximum context length is (\d+) tokens"
    r"(?:.*?so a prompt has at most (\d+))?"
)
_CHARS_A_TOKEN = 4
"""Of usual texts, for a prompt that is too long to count its tokens."""


def _anthropic_words(message: str) -> str:
    """The message, in Anthropic's words if a prompt is too long. Claude Code looks for these, and
    makes the conversation shorter."""
    found = _TOO_LONG.search(message)
    if found is None:
        return message
    number, most = int(found[1]), int(found[4] or found[3])
    words = "prompt is too long: {} tokens > {} maximum"
    if found[2] == "tokens":
        return words.format(number, most)
    about = max(most + 1, number // _CHARS_A_TOKEN)
    return f"{words.format(about, most)}; it has {number} characters, too many to count its tokens"


def invalid(param: str, reason: str) -> ApiError:
    """The error for a field with a wrong value."""
    return ApiError(400, f"{param}: {reason}", param=param)


def share_used_up(
    tenant: str | None, share: str, headers: Mapping[str, str] | None = None
) -> ApiError:
    """The error for a tenant that leaves the others too little of something.

    Args:
        share: what it has a share of, how much it has, and the remedy.
    """
    message = f"tenant {tenant or ''!r} has used up its share of {share}"
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def no_such_model(name: str, known: Sequence[str]) -> ApiError:
    """The error for a model that is none of the ``known`` ones."""
    names = ", ".join(map(repr, known))
    there = f"there is {names}" if len(known) == 1 else f"there are {names}"
    given = name if len(name) <= _MAX_MODEL_CHARS else f"{name[:_MAX_MODEL_CHARS]}…"
    message = f"model: got {given!r}; no such model; {there}"
    return ApiError(404, message, param="model", code="model_not_found")


def no_such_route() -> ApiError:
    """Names the routes of the API. Its reader mostly has a wrong base URL, or wants another API."""
    return ApiError(
        404,
        "no such route; there are POST /v1/chat/completions, POST /v1/completions, "
        "POST /v1/responses, POST /v1/messages and GET /v1/models",
    )


def from_validation(error: ValidationError) -> ApiError:
    """The first mistake in a request's body, without texts of the request."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part)[:MAX_NAME_CHARS] for part in first["loc"])
    message = what_is_allowed(first["type"], first["msg"], "a JSON object")
    if param:
        # This project's own messages say themselves what was given.
        has_value = first["type"] not in ("missing", "value_error")
        return invalid(param, f"got {shown_value(first['input'])}; " * has_value + message)
    if message.startswith("must "):
        return ApiError(400, f"the body {message}")
    # A mistake of several fields: the schema's own message begins with one of them.
    name, separator, reason = message.partition(": ")
    return invalid(name, reason) if separator and _is_path(name) else ApiError(400, message)


def _is_path(name: str) -> bool:
    return all(part.isidentifier() or part.isdecimal() for part in name.split("."))


def from_client_error(error: ClientError, fields: Mapping[str, str]) -> ApiError:
    """The answer to the gateway's own client about a failed job.

    Args:
        error: loses its traceback. Its frames refer to the request and to the failed task. Such a
            cycle would keep large requests until it is collected.
        fields: names that differ from those of ``/v1/completions``, by the server's names.
    """
    error.__traceback__ = None
    if isinstance(error, InvalidRequest):
        code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else None
        return _refused(str(error), SERVER_FIELDS | dict(fields), code)
    if isinstance(error, ServerOverloaded):
        if error.retry_after_s is None:
            return ApiError(429, str(error), code="queue_full")
        wait = {"Retry-After": str(math.ceil(error.retry_after_s))}
        return ApiError(429, str(error), code="rate_limit_exceeded", headers=wait)
    if isinstance(error, ClientClosed):
        return ApiError(503, "the gateway is shutting down and could not finish the request")
    # Other messages may name addresses and files, which are not for clients.
    logger.warning("a job failed: %s: %s", type(error).__name__, error)
    if isinstance(error, ServerUnavailable | RequestTimeout):
        return ApiError(503, "the model server takes no requests now; try again later")
    return ApiError(500, "the model server failed the request")


def _refused(message: str, fields: Mapping[str, str], code: str | None) -> ApiError:
    if NAMES_FIELD.match(message) is None:
        # The message is about the way to the model, and has its address.
        logger.warning("a job was refused: %s", message)
        is_large = _TOO_LARGE.search(message) is not None
        reason = "it is too large" if is_large else "see the gateway's log"
        return ApiError(
            413 if is_large else 400, f"the model server does not take the request; {reason}"
        )
    name, _, rest = message.partition(": ")
    root = name.partition("[")[0]
    # The client knows its schemas, but not the gateway's grammar.
    if root == _GRAMMAR and root in fields and (about := _ABOUT_SCHEMA.fullmatch(rest)):
        rest = about[1]
    param = fields.get(root, root) + name[len(root) :]
    return ApiError(400, f"{param}: {rest}", code=code, param=param)
