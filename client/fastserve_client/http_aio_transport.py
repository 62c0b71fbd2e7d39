"""HTTP for asyncio: Triton's ``generate_stream``, through httpx2."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import httpx2

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
        self._http = _http_client(endpoint)
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
            answer = await self._http.get(ready_path(model), timeout=timeout_s)
        except httpx2.RequestError:
            return False
        return answer.status_code == httpx2.codes.OK

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            self.cancel(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def _exchange(
        self, request: InferRequest, timeout_s: float | None, deliver: Callable[[Item], None]
    ) -> None:
        decoder = EventDecoder(request.model)
        failure: ClientError | None = None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(
                    "POST", stream_path(request.model), content=encode_request(request)
                ) as answer,
            ):
                if answer.status_code != httpx2.codes.OK:
                    raise refusal(self._url, answer.status_code, await answer.aread())
                async for data in answer.aiter_bytes():
                    for item in decoder.feed(data):
                        if isinstance(item, ClientError):
                            failure = item  # read on: the server ends the answer now
                        else:
                            deliver(item)
        except httpx2.TransportError as error:
            raise connection_failed(self._url, _reason(error)) from None
        except httpx2.RequestError as error:
            raise ServerError(f"{self._url}: cannot read the answer ({error})") from None
        if failure is not None:
            raise failure

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


def _http_client(endpoint: Endpoint) -> httpx2.AsyncClient:
    try:
        url = httpx2.URL(str(endpoint))
        url.host  # noqa: B018 - decoding it checks it
    except (httpx2.InvalidURL, ValueError) as error:
        raise InvalidRequest(f"url: got {str(endpoint)!r}; it cannot be used ({error})") from None
    try:
        return httpx2.AsyncClient(
            base_url=url,
            headers=_HEADERS,
            # No limits: a request without a timeout waits as long as the server lives.
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            # Reading the certificates that the system trusts takes 50 ms, and http:// does not
            # need them.
            verify=endpoint.uses_tls,
        )
    except (httpx2.InvalidURL, ValueError, ImportError) as error:
        raise InvalidRequest(
            f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: got a proxy that cannot be used ({error}); "
            "correct it or unset it"
        ) from None


def _reason(error: BaseException) -> str:
    """The first cause: "Connection refused" rather than "All attempts failed"."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)  # asyncio's own text is longer, and says less
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


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
