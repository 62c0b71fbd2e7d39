"""Reads a request's body within limits, and checks its fields."""

from __future__ import annotations

import asyncio
import logging
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from fastserve_gateway.body_threads import BodyThreads, RunWork
from fastserve_gateway.errors import ApiError, from_validation, invalid
from fastserve_gateway.held_bodies import Take
from fastserve_gateway.json_size import check_number_of_values
from fastserve_gateway.schemas import RequestBody
from fastserve_gateway.strict_fields import Body, first_names

logger = logging.getLogger(__name__)

IGNORED_FIELDS_HEADER = "FastServe-Ignored-Fields"
READ_TIMEOUT_S = 60.0
"""How long a body may take. A vanished client would hold its part of the memory for ever."""

# A byte of a prompt takes two in the message to the server, and 45 in its body (docs/deploy.md,
# *Sizing*). The body counts once, and the messages of all its answers but the first beside it.
_MESSAGE_SHARE = 20

# Sets of ignored fields that are remembered, so that they are not logged again.
_MAX_LOGGED = 256

BodyT = TypeVar("BodyT", bound=Body)


class ReadBody(NamedTuple, Generic[BodyT]):
    """A body that has come and is valid."""

    fields: BodyT
    run: RunWork
    """Runs more work on it and its answers: on a thread if they are large."""


async def read_body(
    request: Request, schema: type[BodyT], max_bytes: int, take: Take, threads: BodyThreads
) -> ReadBody[BodyT]:
    """Returns the fields of a JSON body.

    Raises:
        ApiError: the body is no JSON or compressed (415), too large, alone or times the number of
            answers (413), or too slow (408); a field is wrong or missing (400); other bodies leave
            no room (429), or no time (503).
        starlette.requests.ClientDisconnect: the client went away.
    """
    # A page in a browser can send text/plain to any address, but JSON only with CORS.
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type.strip().lower() != "application/json":
        raise ApiError(415, "the header Content-Type must be application/json")
    encoding = request.headers.get("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        # A few compressed bytes may become gigabytes, and bodies are small without compression.
        raise ApiError(415, "Content-Encoding must be left out: bodies are not decompressed")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        # A client that waits for "100 Continue" (RFC 9110, 10.1.1) may send the next request now.
        waits = "expect" in request.headers
        raise _too_large(max_bytes, {"Connection": "close"} if waits else {})
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for part in request.stream():
                take(len(part))
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {READ_TIMEOUT_S:g} s") from None
    fields = await threads.run(len(body), partial(parse_body, body, schema))
    # The server gets the prompts once for each answer.
    num_bytes = len(body) * fields.num_choices
    if num_bytes > max_bytes:
        raise ApiError(
            413, f"the body, for {fields.num_choices} answers, is larger than {max_bytes} bytes"
        )
    take((num_bytes - len(body)) // _MESSAGE_SHARE)
    return ReadBody(fields, partial(threads.run, num_bytes))


def parse_body(body: bytes | bytearray, schema: type[BodyT]) -> BodyT:
    """Skips a byte order mark before the body (RFC 8259, 8.1). Raises ApiError (400)."""
    try:
        check_number_of_values(body)
    except ValueError as error:
        raise ApiError(400, f"the body {error}") from None
    try:
        # Not model_validate_json: its own form of the JSON takes more memory than the fields.
        return schema.model_validate(from_json(body.removeprefix(BOM_UTF8)))
    except ValidationError as error:
        raise from_validation(error) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def check_number_of_jobs(body: RequestBody, max_jobs: int) -> None:
    """Raises ApiError: too many answers (400)."""
    if body.num_prompts * body.num_choices > max_jobs:
        raise invalid(
            "prompt" if body.num_prompts > 1 else "n",
            f"got {body.num_prompts} prompts with {body.num_choices} answers each; "
            f"at most {max_jobs} answers in all",
        )


def ignored_fields(names: Sequence[str], *, strict: bool) -> dict[str, str]:
    """Headers of the answer: the names of ignored fields, if any.

    Raises:
        ApiError: there are some, and ``strict`` (400).
    """
    shown = list(map(quote, first_names(names)))
    if not shown:
        return {}
    if strict:
        raise invalid(shown[0], "unknown field")
    text = ", ".join(shown)
    _log_ignored(text)
    return {IGNORED_FIELDS_HEADER: text}


@lru_cache(maxsize=_MAX_LOGGED)
def _log_ignored(names: str) -> None:
    """A line for the same names once: a client mostly sends them with each request."""
    logger.info("fields of requests that are ignored: %s", names)


def _too_large(max_bytes: int, headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", headers=headers)
