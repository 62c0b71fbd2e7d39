"""Typed errors of the client, and how Triton's answers map to them."""

from __future__ import annotations

import re


class ClientError(Exception):
    """Base of every error that this package raises. The message is one line for a person."""


class InvalidRequest(ClientError):
    """The request is malformed or asks for more than the server has (``INVALID_ARG``).

    The message names the field, what was given and what is allowed. Trying again is useless.
    """


class ServerUnavailable(ClientError):
    """The server takes no new request now (``UNAVAILABLE``): its queue is full or it drains.

    Trying again later can succeed.
    """


class ServerOverloaded(ServerUnavailable):
    """The server's queue is full."""


class ConnectionFailed(ServerUnavailable):
    """Nothing answers at the URL, or the connection broke during the request."""


class RequestTimeout(ClientError):
    """The request's own ``timeout_s`` passed; the job is cancelled."""


class RequestCancelled(ClientError):
    """The server cancelled the job; a client's own cancellation only ends the iteration."""


class ServerError(ClientError):
    """The server failed the job (``INTERNAL``), or its answer makes no sense."""


class WorkloadError(ClientError):
    """A workload, or the report about it, cannot be made as asked.

    The message names the field or the file (with its line), and what is allowed.
    """


# Triton's gRPC streams carry an error's text but not its code. (The header `triton_grpc_error`
# asks for codes too, but tritonserver 24.10 was seen to crash when responses follow the error, so
# this client never sends it.) So the text decides:
_INVALID = re.compile(
    # "max_tokens: got -1; must be …" is how this model's server names a field and a value.
    r"^[\w, ]+: got "
    # The rest are Triton's own refusals of a request that does not fit config.pbtxt.
    r"|^(\[request id: .*?\] )?(unexpected|expected|inference input|input .* expected) ",
    re.IGNORECASE,
)
_OVERLOADED = re.compile(r"\brequests are queued already\b", re.IGNORECASE)
_UNAVAILABLE = re.compile(r"\b(try again later|shutting down|draining|not ready)\b", re.IGNORECASE)
_CANCELLED = re.compile(r"\bcancell?ed\b", re.IGNORECASE)


def error_from_message(message: str) -> ClientError:
    """The error for the ``error_message`` of a stream's response."""
    line = " ".join(message.split())
    if _INVALID.search(line):
        return InvalidRequest(line)
    if _OVERLOADED.search(line):
        return ServerOverloaded(line)
    if _UNAVAILABLE.search(line):
        return ServerUnavailable(line)
    if _CANCELLED.search(line):
        return RequestCancelled(line)
    return ServerError(line)


def error_from_status(url: str, code: str, details: str) -> ClientError:
    """The error for a call that ended with a gRPC status; ``code`` is its name (``UNAVAILABLE``).

    Errors of the model arrive as messages of the stream, so a status speaks of the connection or
    of the server as a whole.
    """
    line = " ".join(details.split())
    if code == "UNAVAILABLE":
        # gRPC puts what failed first and why last: "failed to connect to …: Connection refused".
        reason = line.rpartition(": ")[2]
        return ConnectionFailed(
            f"no server at {url} ({reason}); start one with 'fastserve serve MODEL', "
            "or name another URL"
        )
    if code == "DEADLINE_EXCEEDED":
        return RequestTimeout(f"{url} did not finish in time; the job is cancelled")
    if code == "CANCELLED":
        return RequestCancelled(f"{url}: {line}")
    if code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"):
        return InvalidRequest(f"{url}: {line}")
    return ServerError(f"{url}: {code}: {line}")
