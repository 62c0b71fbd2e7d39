"""Typed errors of the client, and how Triton's answers map to them."""

from __future__ import annotations

import re


class ClientError(Exception):
    """Base of every error that this package raises. The message is one line for a person."""


class InvalidRequest(ClientError):
    """The request is malformed or asks for more than the server has (``INVALID_ARG``).

    The message names the field, the given value and the allowed ones. Trying again is useless.
    """


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and ``max_tokens`` together, are longer than the model's context.

    The message names the limit.
    """


class ServerUnavailable(ClientError):
    """The server takes no new request now (``UNAVAILABLE``): its queue is full, it drains, or it
    does not have the model.

    Trying again later can succeed.
    """


class ServerOverloaded(ServerUnavailable):
    """The server's queue is full, the request's tenant is at a limit of its own, or too many watch
    the server."""

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the request fits. None: the server does not say, and only a tenant's
        limit has such a time."""
        match = _RETRY_AFTER.search(str(self))
        return None if match is None else float(match[1])


class ConnectionFailed(ServerUnavailable):
    """Nothing answers at the URL, or the connection broke during the request."""


class ModelLost(ServerUnavailable):
    """The process of the server's model has died. ``fastserve serve`` restarts the server."""


class RequestTimeout(ClientError):
    """The request's own ``timeout_s`` passed; the job is cancelled."""


class RequestCancelled(ClientError):
    """The server cancelled the job; a client's own cancellation only ends the iteration."""


class ClientClosed(RequestCancelled):
    """The client was closed, before the request or while it ran."""


class ServerError(ClientError):
    """The server failed the job (``INTERNAL``), or its answer makes no sense."""


class ServerFailed(ServerError):
    """The server's engine failed, and all its jobs with it. Another server may take the request."""


class WorkloadError(ClientError):
    """A workload, or the report about it, cannot be made as asked.

    The message names the field or the file (with its line), and what is allowed.
    """


def shown(value: object) -> str:
    """A value for a message. Python itself refuses to write numbers of more than 4300 digits."""
    try:
        return repr(value)
    except ValueError:
        return "a number of too many digits"


# Triton's gRPC streams carry an error's text but not its code, so the text decides. The header
# `triton_grpc_error` would ask for codes. But then a stream ends with its first error, and
# tritonserver 24.10 crashes if another of its requests still runs. So this client never sends it.
NAMES_FIELD = re.compile(r"^[\w, .\[\]]+: got ")
"""Matches this project's messages about a request: "max_tokens: got -1; must be …"."""
# The given value is a number, or a length in quotes. So no prompt with these words gets here.
_CONTEXT_LENGTH = re.compile(
    r"^\w+: got ('\d+ \w+'|\d+); This model's maximum context length is \d+ tokens\b"
)
_INVALID = re.compile(
    # Triton's own refusals of a request that does not fit config.pbtxt.
    r"^(\[request id: .*?\] )?(unexpected|expected|inference input|input .* expected) ",
    re.IGNORECASE,
)
# The end of the message of a tenant's limit: "…; try again in 2.5 s".
_RETRY_AFTER = re.compile(r"; try again in (\d+(?:\.\d+)?) s$")
_OVERLOADED = re.compile(
    rf"\b(requests are queued|others watch) already\b|{_RETRY_AFTER.pattern}", re.IGNORECASE
)
# Triton itself says "not healthy" of a model whose process has died, until the server restarts, and
# "unknown" of one that is not loaded, also while it unloads and before it is ready again.
_UNKNOWN_MODEL = re.compile(r"^(\[request id: .*?\] )?request for unknown model: ", re.IGNORECASE)
_MODEL_LOST = re.compile(r"\bnot healthy\b", re.IGNORECASE)
_UNAVAILABLE = re.compile(r"\b(try again later|shutting down|draining|not ready)\b", re.IGNORECASE)
_FAILED = re.compile(r"^(the model's processes failed: |internal error in the engine; )")
_CANCELLED = re.compile(r"\bcancell?ed\b", re.IGNORECASE)


def error_from_message(message: str) -> ClientError:
    """The error for the ``error_message`` of a stream's response."""
    line = " ".join(message.split())
    if _CONTEXT_LENGTH.match(line):
        return ContextLengthExceeded(line)
    if NAMES_FIELD.match(line) or _INVALID.search(line):
        return InvalidRequest(line)
    if _OVERLOADED.search(line):
        return ServerOverloaded(line)
    if _UNKNOWN_MODEL.match(line):
        remedy = "give the name of a model that the server has loaded, as --model or model="
        return ServerUnavailable(f"{line}; {remedy}")
    if _MODEL_LOST.search(line):
        return ModelLost(line)
    if _UNAVAILABLE.search(line):
        return ServerUnavailable(line)
    if _FAILED.match(line):
        return ServerFailed(line)
    if _CANCELLED.search(line):
        return RequestCancelled(line)
    return ServerError(line)


def connection_failed(url: str, reason: str) -> ConnectionFailed:
    """Nothing answers at ``url``, or the connection broke."""
    return ConnectionFailed(
        f"no server at {url} ({reason}); start one with 'fastserve serve MODEL', "
        "or name another URL"
    )


def request_timeout(url: str) -> RequestTimeout:
    return RequestTimeout(f"{url} did not finish in time; the job is cancelled")


def error_from_status(url: str, code: str, details: str) -> ClientError:
    """The error for a call that ended with a gRPC status; ``code`` is its name (``UNAVAILABLE``).

    Errors of the model arrive as messages of the stream. So a status is about the connection or
    the server as a whole.
    """
    line = " ".join(details.split())
    if code == "UNAVAILABLE":
        # gRPC writes the reason last: "failed to connect to …: Connection refused". After a
        # certificate that it does not trust it adds ": OK".
        return connection_failed(url, line.removesuffix(": OK").rpartition(": ")[2])
    if code == "DEADLINE_EXCEEDED":
        return request_timeout(url)
    if code == "CANCELLED":
        return RequestCancelled(f"{url}: {line}")
    if code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"):
        return InvalidRequest(f"{url}: {line}")
    return ServerError(f"{url}: {code}: {line}")


def error_from_http(url: str, status: int, message: str | None) -> ClientError:
    """The error for an answer whose status is not 200.

    Args:
        message: Triton's message. ``None``: the answer has none, so it comes from a proxy or
            another kind of server.
    """
    if message is not None:
        error = error_from_message(message)
        if type(error) is not ServerError:
            return error
        kind = {400: InvalidRequest, 503: ServerUnavailable}.get(status, ServerError)
        return kind(str(error))
    line = f"{url} answered with the HTTP status {status}"
    if status in (502, 503, 504):  # a proxy has lost the server behind it
        return ServerUnavailable(line)
    if status == 413:
        return InvalidRequest(f"{line}: the request is too large")
    return ServerError(f"{line}; is it a tritonserver?")
