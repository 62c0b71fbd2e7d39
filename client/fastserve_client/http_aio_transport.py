"""HTTP for asyncio: Triton's ``generate_stream``, through aiohttp."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
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

Item = Outputs | BaseException | None
"""What a call delivers: responses, then an error, or None after a good end."""


class AioHttpTransport:
    """An ``AioTransport`` with a connection for each running request, and a task that reads it.

    Triton sends the status of an answer with the first token. So a request needs a task of its own,
    before its caller waits for it. The transport belongs to one event loop.
    """

    only_streams = True
    """tritonserver 24.10 notices only when it writes that a client has gone."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises InvalidRequest: the host, or a proxy of the environment, cannot exist."""
        self._url = str(endpoint)
        self._uses_tls = endpoint.uses_tls
        self._proxy = _proxy(endpoint)
        _check_host(endpoint)
        self._opened: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._uncancelled: set[asyncio.Task[None]] = set()

    def start(self, request: InferRequest, timeout_s: float | None) -> AioHttpCall:
        items: asyncio.Queue[Item] = asyncio.Queue()
        return AioHttpCall(self, self.send(request, timeout_s, items.put_nowait), items)

    def send(
        self, request: InferRequest, timeout_s: float | None, deliver: Callable[[Item], None]
    ) -> asyncio.Task[None]:
        """Sends the request in a task, which ``cancel`` takes.

        Only the job's own ``max_tokens`` bounds the responses that were delivered and not yet
        taken. Triton would keep them otherwise.
        """
        task = asyncio.create_task(self._exchange(request, timeout_s, deliver))
        self._tasks.add(task)
        self._uncancelled.add(task)
        task.add_done_callback(lambda done: self._end(done, deliver))
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Closes the connection of a request that still runs, which cancels the job."""
        # Only once: a second time would interrupt the task while it closes the connection.
        if task in self._uncancelled:
            self._uncancelled.discard(task)
            task.cancel()

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session().get(ready_path(model), allow_redirects=False) as answer,
            ):
                return answer.status == HTTPStatus.OK
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            self.cancel(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._opened is not None:
            await self._opened.close()

    async def _exchange(
        self, request: InferRequest, timeout_s: float | None, deliver: Callable[[Item], None]
    ) -> None:
        decoder = EventDecoder(request.model)
        failure: ClientError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                # Until now the loop may have had no time to see that a kept connection is closed.
                await asyncio.sleep(0)
                async with self._session().post(
                    stream_path(request.model), data=encode_request(request), allow_redirects=False
                ) as answer:
                    if answer.status != HTTPStatus.OK:
                        raise refusal(self._url, answer.status, await answer.read())
                    async for data in answer.content.iter_any():
                        for item in decoder.feed(data):
                            if isinstance(item, ClientError):
                                failure = item  # read on: the server ends the answer now
                            else:
                                deliver(item)
        except aiohttp.ClientError as error:
            raise _typed(self._url, error) from None
        if failure is not None:
            raise failure

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
                proxy=self._proxy,
            )
        return self._opened

    def _end(self, task: asyncio.Task[None], deliver: Callable[[Item], None]) -> None:
        self._tasks.discard(task)
        self._uncancelled.discard(task)
        if task.cancelled():
            deliver(ClientClosed("the client was closed"))
            return
        error = task.exception()
        if isinstance(error, TimeoutError):
            error = request_timeout(self._url)
        deliver(error)


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


def _typed(url: str, error: aiohttp.ClientError) -> ClientError:
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
    """One POST to ``generate_stream``."""

    def __init__(
        self, transport: AioHttpTransport, task: asyncio.Task[None], items: asyncio.Queue[Item]
    ) -> None:
        self._transport = transport
        self._task = task
        self._items = items

    async def __anext__(self) -> Outputs:
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._transport.cancel(self._task)
