"""From the bytes of a request to its fields, within limits."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from fastserve_gateway.errors import ApiError, from_validation, invalid, no_such_model
from fastserve_gateway.held_bodies import Take
from fastserve_gateway.schemas import ChatRequest, CompletionRequest

IGNORED_FIELDS_HEADER = "FastServe-Ignored-Fields"
# A header must stay short, whatever a client calls its fields.
_MAX_NAMES = 20
_MAX_NAME_CHARS = 64
READ_TIMEOUT_S = 60.0
"""For a body to come: a client that has vanished would hold its part of the memory for ever."""

RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)


async def read_body(
    request: Request, schema: type[RequestT], max_bytes: int, take: Take
) -> RequestT:
    """The fields of a JSON body.

    Raises:
        ApiError: no JSON, or compressed (415), too large, alone or for so many answers (413), a
            field that is wrong or missing (400), too slow (408), or no room for it beside others
            (429).
        starlette.requests.ClientDisconnect: the client went away.
    """
    # A page in a browser can send text/plain to any address, but not JSON without CORS.
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type.strip().lower() != "application/json":
        raise ApiError(415, "Content-Type must be application/json")
    encoding = request.headers.get("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        # A few bytes may become gigabytes, and bodies are small as they are.
        raise ApiError(415, "Content-Encoding must be left out: bodies are not decompressed")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        # Who waits for leave to send it (RFC 9110, 10.1.1) may send the next request in its place.
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
    fields = parse_body(body, schema)
    # The server gets the prompts with each answer that is wanted.
    if len(body) * fields.num_choices > max_bytes:
        raise ApiError(
            413, f"the body, for {fields.num_choices} answers, is larger than {max_bytes} bytes"
        )
    return fields


def parse_body(body: bytes | bytearray, schema: type[RequestT]) -> RequestT:
    """A byte order mark before it is passed over (RFC 8259, 8.1). Raises ApiError (400)."""
    try:
        # Not model_validate_json, whose own form of the JSON takes more memory than the fields.
        return schema.model_validate(from_json(body.removeprefix(BOM_UTF8)))
    except ValidationError as error:
        raise from_validation(error) from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


def check_fields(
    body: CompletionRequest | ChatRequest, model: str, max_jobs: int, *, strict: bool
) -> dict[str, str]:
    """What the schema does not know of.

    Returns:
        Headers of the answer: the names of the fields that were ignored, if any.

    Raises:
        ApiError: another model (404); too many answers, or an unknown field if ``strict`` (400).
    """
    if body.model != model:
        raise no_such_model(model)
    if body.num_prompts * body.num_choices > max_jobs:
        raise invalid(
            "prompt" if body.num_prompts > 1 else "n",
            f"got {body.num_prompts} prompts with {body.num_choices} answers each; "
            f"at most {max_jobs} answers in all",
        )
    names = [quote(name[:_MAX_NAME_CHARS]) for name in body.unknown_fields()[:_MAX_NAMES]]
    if not names:
        return {}
    if strict:
        raise invalid(names[0], "unknown field")
    return {IGNORED_FIELDS_HEADER: ", ".join(names)}


def _too_large(max_bytes: int, headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", headers=headers)
