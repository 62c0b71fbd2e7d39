"""Any server of OpenAI's API with streaming completions: the gateway, vLLM, SGLang and others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from fastserve_client import protocol
from fastserve_client.errors import (
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerOverloaded,
    ServerUnavailable,
)
from fastserve_client.protocol import DEFAULT_GRPC_PORT

from fastserve_bench.connection import Request, TimedAnswer, without_credentials
from fastserve_bench.workload.service_class import ServiceClass

API_KEY_VARIABLE = "OPENAI_API_KEY"
_CHECK_TIMEOUT_S = 10.0
# A message should be short, but some servers answer errors with whole pages.
_MAX_REASON_CHARS = 200
_OTHER_URLS = (
    "give the base of an OpenAI API, such as http://HOST:PORT/v1, or for a tritonserver its gRPC "
    f"port, grpc://HOST:{DEFAULT_GRPC_PORT}"
)
_DATA = b"data:"
_DONE = b"[DONE]"
# Text fields of a delta. Servers have two names for a model's reasoning.
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
# With any other reason an answer is whole, or was cut off on purpose.
_UNFINISHED: dict[str, type[ClientError]] = {
    "error": ServerError,
    "abort": RequestCancelled,
    "cancelled": RequestCancelled,
}


class OpenAIConnection:
    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        """Connects to nothing yet.

        Args:
            url: base URL, such as ``http://127.0.0.1:9000/v1``.
            model: ``None`` takes the first that the server lists.
        """
        self._base = url
        self._url = without_credentials(url)  # for messages
        self._model = model
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # As many connections as requests, so that the server decides which of them wait.
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def check(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_S)
        try:
            async with self._session.get(f"{self._base}/models", timeout=timeout) as response:
                if response.status == 404:
                    raise InvalidRequest(
                        f"url: got {self._url}, where no OpenAI API is (HTTP 404); {_OTHER_URLS}"
                    )
                if response.status != 200:
                    raise await _refusal(response)
                models = [model["id"] for model in (await response.json(content_type=None))["data"]]
        except (TimeoutError, aiohttp.ClientError) as error:
            raise self._not_there(error) from None
        except (ValueError, KeyError, TypeError):
            raise ServerError(
                f"{self._url}/models did not answer with a list of models; {_OTHER_URLS}"
            ) from None
        if self._model is None and models:
            self._model = models[0]
        if self._model not in models:
            raise InvalidRequest(
                f"model: got {self._model!r}; {self._url} has {', '.join(models) or 'none'}"
            )

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.chat:
            path, body["messages"] = "chat/completions", request.messages
        else:
            path, body["prompt"] = "completions", request.prompt
        if request.exact:
            body["ignore_eos"] = True
        headers = _apply_class(request.service, body)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(
                f"{self._base}/{path}", json=body, headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                return await _read_answer(response)
        except TimeoutError:
            raise RequestTimeout(f"{self._url} did not finish in time") from None
        except aiohttp.ClientConnectorError as error:
            raise self._not_there(error) from None
        except aiohttp.ClientError as error:
            raise ConnectionFailed(
                f"{self._url}: the connection broke ({type(error).__name__})"
            ) from None

    async def close(self) -> None:
        await self._session.close()

    def _not_there(self, error: Exception) -> ConnectionFailed:
        reason = getattr(error, "strerror", None) or type(error).__name__
        return ConnectionFailed(f"no server at {self._url} ({reason}); name another --url")


def _apply_class(service: ServiceClass, body: dict[str, Any]) -> dict[str, str]:
    """Adds what the class asks for to the body, and returns the headers that it needs.

    Classes that ask for nothing change nothing: not every server knows these fields.
    """
    fields = service.fields
    headers = {
        header: f"{fields[name]:.15g}"
        for name, header in protocol.SLO_HEADERS.items()
        if name in fields
    }
    if protocol.PRIORITY in fields:
        body[protocol.PRIORITY] = fields[protocol.PRIORITY]
    if service.key_variable is not None:  # the key names the tenant
        headers["Authorization"] = f"Bearer {os.environ[service.key_variable]}"
    elif protocol.TENANT in fields:
        body[protocol.TENANT] = fields[protocol.TENANT]
    return headers


async def _read_answer(response: aiohttp.ClientResponse) -> TimedAnswer:
    """Reads the events of an answer.

    An event may hold several tokens, so only ``usage`` tells how many there were. The first token
    counts when its text comes. Some servers send a role or an empty text before it.
    """
    first_s = last_s = None
    usage: Any = None
    async for now_s, event in _events(response):
        usage = event.get("usage") or usage
        for choice in _choices(event):
            if _has_text(choice):
                first_s = first_s or now_s
                last_s = now_s
            elif first_s is None or choice.get("finish_reason") is not None:
                last_s = now_s  # an answer without text shows when it ends
    if last_s is None:
        raise ServerError("the answer had no token")
    return TimedAnswer(first_s or last_s, last_s, *_token_counts(usage))


def _choices(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's event.

    Raises:
        RequestCancelled, ServerError: the answer ends unfinished, or the event makes no sense.
    """
    error = event.get("error")
    if error is None and event.get("object") == "error":  # some servers write it so
        error = event.get("message")
    if error is not None:
        raise ServerError(_shorten(f"the stream ended with an error: {error}"))
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise ServerError("the stream held an event whose choices are no JSON objects")
    for reason in (one.get("finish_reason") for one in choices):
        if isinstance(reason, str) and reason in _UNFINISHED:
            raise _UNFINISHED[reason](f"the stream ended with finish_reason {reason!r}")
    return choices


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a user sees some text: of an answer, its reasoning, or a tool call."""
    delta = choice.get("delta")
    shown = [delta.get(name) for name in _TEXTS] if isinstance(delta, dict) else []
    return any((choice.get("text"), *shown))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yields server-sent events, each with the time when it came.

    Raises:
        ConnectionFailed: the stream ended before the answer.
        ServerError: an event that makes no sense.
    """
    is_whole = False
    async for line in response.content:
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            is_whole = True
        else:
            yield time.monotonic(), _parse(data)
    if not is_whole:
        raise ConnectionFailed(f"{response.url} ended the stream before the answer ended")


def _token_counts(usage: Any) -> tuple[int, int]:
    """Tokens of prompt and answer. Raises ServerError if the server has not counted them."""
    try:
        counts = usage["prompt_tokens"], usage["completion_tokens"]
    except (KeyError, TypeError):
        raise ServerError(
            "the stream ended without usage, so its tokens cannot be counted; the server must "
            "know stream_options.include_usage"
        ) from None
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise ServerError(
            f"usage: got {counts[0]!r} tokens of the prompt and {counts[1]!r} of the answer; "
            "a job with a latency has at least one of each"
        )
    return counts


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ServerError("the stream held an event that is no JSON object")
    return event


async def _refusal(response: aiohttp.ClientResponse) -> ClientError:
    """The error for an HTTP status other than 200."""
    status = response.status
    text = await response.text(errors="replace")
    with suppress(ValueError, KeyError, TypeError):  # not in OpenAI's shape: take the text
        text = json.loads(text)["error"]["message"]
    reason = _shorten(f"HTTP {status}: {text}")
    if status == 429:
        return ServerOverloaded(reason)
    if status in (502, 503, 504):
        return ServerUnavailable(reason)
    if status in (401, 403):
        return InvalidRequest(f"{reason} (the API key is read from {API_KEY_VARIABLE})")
    if 400 <= status < 500:
        return InvalidRequest(reason)
    return ServerError(reason)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON_CHARS else line[: _MAX_REASON_CHARS - 1] + "…"
