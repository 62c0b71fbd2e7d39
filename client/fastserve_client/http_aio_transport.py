"""HTTP for asyncio: Triton's ``generate_stream``, through aiohttp."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from http import HTTPStatus
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError
from yarl import URL

from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import (
    ClientClosed,
    ClientError,
    InvalidRequest,
    ServerError,
    connection_failed,
    request_timeout,
)
from fastserve_client.http_codec import (
    EventDecoder,
    encode_request,
    ready_path,
    refusal,
    stream_path,
)
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs

_CONNECT_TIMEOUT_S = 10.0
_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class AioHttpTransport:
    """An ``AioTransport`` with a connection for each running request, in one event loop."""

    only_streams = True
    """tritonserver 24.10 notices only when it writes that a client has gone."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises InvalidRequest: the host, or a proxy of the environment, cannot exist."""
        self._url = str(endpoint)
        self._uses_tls = endpoint.uses_tls
        self._options: Any = {"proxy": _proxy(endpoint), "allow_redirects": False}
        _check_host(endpoint)
        self._opened: aiohttp.ClientSession | None = None
        self._running: set[AioHttpCall] = set()

    def start(self, request: InferRequest, timeout_s: float | None) -> AioHttpCall:
        call = AioHttpCall(
            self._url, self._post(request), request.model, timeout_s, self._running.discard
        )
        self._running.add(call)
        return call

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session().get(ready_path(model), **self._options) as answer,
            ):
                return answer.status == HTTPStatus.OK
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        for call in tuple(self._running):
            call.cancel()
            await call.wait_until_sent()
        if self._opened is not None:
            await self._opened.close()

    async def _post(self, request: InferRequest) -> aiohttp.ClientResponse:
        # Until now the loop may have had no time to see that a kept connection is closed.
        await asyncio.sleep(0)
        return await self._session().post(
            stream_path(request.model), data=encode_request(request), **self._options
        )

    def _session(self) -> aiohttp.ClientSession:
        """Opened by the first request, in the event loop that it belongs to."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                self._url,
                headers=_HEADERS,
                # No limits: a request without a timeout waits as long as the server lives.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                connector=aiohttp.TCPConnector(
                    limit=0, ssl=ssl.create_default_context() if self._uses_tls else True
                ),
            )
        return self._opened


def _check_host(endpoint: Endpoint) -> None:
    try:
        URL(str(endpoint)).host  # noqa: B018 - decoding it checks it
        endpoint.host.encode("idna")  # as the system's resolver will
    except UnicodeError as error:
        raise InvalidRequest(f"url: got {str(endpoint)!r}; it cannot be used ({error})") from None


def _proxy(endpoint: Endpoint) -> URL | None:
    """The proxy that the environment names for this server."""
    if proxy_bypass(endpoint.target):
        return None
    proxies = getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if not proxy:
        return None
    try:
        url = URL(proxy)
        if url.scheme in ("http", "https") and url.host:
            return url
        reason = "not a URL like http://HOST:PORT"
    except ValueError as error:
        reason = str(error)
    raise InvalidRequest(
        f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: got a proxy that cannot be used ({reason}); "
        "correct it or unset it"
    )


def _http_error(url: str, error: aiohttp.ClientError) -> ClientError:
    cause = error.__cause__
    if isinstance(error, aiohttp.ServerDisconnectedError) or (
        isinstance(error, aiohttp.ClientPayloadError)
        and not isinstance(cause, ContentEncodingError)
    ):
        return connection_failed(url, "the server closed the connection")
    if not isinstance(error, aiohttp.ClientConnectionError):
        return ServerError(f"{url}: cannot read the answer ({' '.join(str(error).split())})")
    if isinstance(cause, ConnectionError) and cause.errno is not None:
        return connection_failed(url, os.strerror(cause.errno))  # shorter than asyncio's own text
    return connection_failed(url, getattr(cause, "strerror", None) or str(error))


class AioHttpCall(AsyncIterator[Outputs]):
    """One POST to ``generate_stream``.

    Triton sends the status of an answer with the first token. So a task sends the request, before
    anybody waits for a response.

    Args:
        post: sends the request and returns the answer.
        timeout_s: after this time the call ends with RequestTimeout.
        on_end: called once, when the call needs its connection no more.
    """

    def __init__(
        self,
        url: str,
        post: Coroutine[None, None, aiohttp.ClientResponse],
        model: str,
        timeout_s: float | None,
        on_end: Callable[[AioHttpCall], None],
    ) -> None:
        self._url = url
        self._decoder = EventDecoder(model)
        self._on_end = on_end
        self._posting = asyncio.create_task(post)
        self._posting.add_done_callback(_answer_of)  # no exception may be left unread
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s, self._end, request_timeout(url))
        self._responses: deque[Outputs] = deque()
        self._error: ClientError | None = None
        self._ended = False

    async def __anext__(self) -> Outputs:
        while not self._responses:
            if not self._ended:
                try:
                    await self._read()
                except aiohttp.ClientError as error:
                    self._end(_http_error(self._url, error))
                except ClientError as error:
                    self._end(error)
                except asyncio.CancelledError:
                    self.cancel()
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
            elif self._error is not None:
                raise self._error
            else:
                raise StopAsyncIteration
        return self._responses.popleft()

    def cancel(self) -> None:
        self._end(ClientClosed("the client was closed"))

    async def wait_until_sent(self) -> None:
        """Until the task that sends the request has ended."""
        await asyncio.wait((self._posting,))

    async def _read(self) -> None:
        """Takes what has come, or waits for more."""
        answer = await self._posting
        if answer.status != HTTPStatus.OK:
            raise refusal(self._url, answer.status, await answer.read())
        data = await answer.content.readany()
        for item in self._decoder.feed(data):
            if isinstance(item, ClientError):
                self._error = item  # read on: the server ends the answer now
            else:
                self._responses.append(item)
        if not data:
            self._end(self._error)

    def _end(self, error: ClientError | None) -> None:
        """Closes the connection, unless it has delivered the whole answer."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        if self._posting.done():
            answer = _answer_of(self._posting)
            if answer is not None:
                answer.close()
        self._posting.cancel()
        self._on_end(self)


def _answer_of(posting: asyncio.Task[aiohttp.ClientResponse]) -> aiohttp.ClientResponse | None:
    """The answer of a task that has ended; None if it has none."""
    if posting.cancelled() or posting.exception() is not None:
        return None
    return posting.result()
