"""The asyncio client."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from fastserve_client import protocol
from fastserve_client.aio_watch import AsyncEngineWatch
from fastserve_client.client import READY_TIMEOUT_S
from fastserve_client.droppable_call import DroppableCall
from fastserve_client.endpoint import DEFAULT_URL, Endpoint
from fastserve_client.errors import ClientClosed, ClientError, ConnectionFailed
from fastserve_client.exchange import Exchange
from fastserve_client.request import (
    InferRequest,
    build_description_request,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
    build_watch_request,
)
from fastserve_client.response import (
    Outputs,
    is_large,
    read_description,
    read_detokenization,
    read_tokenization,
)
from fastserve_client.results import Chunk, Completion, Tokenization
from fastserve_client.retry import RetryPolicy
from fastserve_client.transport import AioCall, open_aio_transport

if TYPE_CHECKING:
    from typing import Self, Unpack

    from fastserve_client.model_description import ModelDescription
    from fastserve_client.options import ChatTemplateOptions, Message, Prompt, RequestOptions


class AsyncFastServeClient:
    """``FastServeClient`` for asyncio: the same arguments, results and errors.

    It belongs to the event loop in which it is made, and is not thread-safe. It connects at the
    first request.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, model: str = protocol.MODEL_NAME, max_retries: int = 0
    ) -> None:
        """Connects to nothing yet. Takes the arguments of ``FastServeClient``.

        Raises:
            InvalidRequest: the URL cannot be understood, or ``max_retries`` is negative.
            RuntimeError: no event loop runs.
        """
        asyncio.get_running_loop()
        self.endpoint = Endpoint.parse(url)
        self.model = model
        self._retry = RetryPolicy(max_retries)
        self._transport = open_aio_transport(self.endpoint)
        self._calls: weakref.WeakSet[DroppableCall] = weakref.WeakSet()
        self._closed = False
        self.num_answers = 0
        """How often the model has said something, in whatever request."""

    @property
    def only_streams(self) -> bool:
        """Whether the server sends all answers in parts: see ``Transport``."""
        return self._transport.only_streams

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        perf_metrics: bool = False,
        request_id: str = "",
        trace_context: Mapping[str, str] | None = None,
        output_ids_so_far: Sequence[int] = (),
        **options: Unpack[RequestOptions],
    ) -> AsyncTokenStream:
        """Sends the request and returns an asynchronous iterator over its chunks.

        It is not a coroutine: ``async for chunk in client.stream(…)``. It has the arguments and
        errors of ``FastServeClient.stream``.
        """
        request = build_request(
            self.model,
            prompt,
            options,
            stream=True,
            perf_metrics=perf_metrics,
            request_id=request_id,
            trace_context=trace_context,
            output_ids_so_far=output_ids_so_far,
        )
        return self._start(request, timeout_s)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        perf_metrics: bool = False,
        request_id: str = "",
        trace_context: Mapping[str, str] | None = None,
        output_ids_so_far: Sequence[int] = (),
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Returns the whole completion. It has the arguments of ``stream``, and its errors.

        Cancelling the task that awaits it cancels the request.
        """
        request = build_request(
            self.model,
            prompt,
            options,
            stream=self._transport.only_streams,
            perf_metrics=perf_metrics,
            request_id=request_id,
            trace_context=trace_context,
            output_ids_so_far=output_ids_so_far,
        )
        async with self._start(request, timeout_s) as chunks:
            return Completion.from_chunks([chunk async for chunk in chunks])

    def watch(self, interval_s: float = 0.5) -> AsyncEngineWatch:
        """Iterates over pictures of the engine, one every ``interval_s`` seconds (0.05 to 10).

        It is not a coroutine: ``async for state in client.watch()``. A watch is no job and needs no
        place in the queue. The server takes a few watches at a time.

        Raises:
            InvalidRequest: the interval is no number of seconds. (Iterating raises the server's
                refusals: see ``AsyncEngineWatch``.)
        """
        request = build_watch_request(self.model, interval_s)
        return AsyncEngineWatch(self._send, request, str(self.endpoint))

    async def describe(self, *, timeout_s: float | None = None) -> ModelDescription:
        """What the server says about its model. It has the errors of ``generate``."""
        outputs = await self._ask(build_description_request(self.model), timeout_s)
        return read_description(self.model, outputs)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        return_token_strs: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[ChatTemplateOptions],
    ) -> Tokenization:
        """The tokens of a text or a conversation; see ``FastServeClient.tokenize``."""
        request = build_tokenize_request(
            self.model,
            prompt,
            {**options, protocol.ADD_SPECIAL_TOKENS: add_special_tokens},
            return_token_strs=return_token_strs,
        )
        return read_tokenization(self.model, await self._ask(request, timeout_s))

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of tokens; see ``FastServeClient.detokenize``."""
        request = build_detokenize_request(self.model, token_ids)
        return read_detokenization(self.model, await self._ask(request, timeout_s))

    async def is_ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Whether the server says that the model takes requests; False if none answers."""
        return not self._closed and await self._transport.is_ready(self.model, timeout_s)

    def drop_calls(self) -> None:
        """Ends all running requests, as if their connections had broken: they raise
        ConnectionFailed. For servers whose connections hold although they answer no more."""
        for call in tuple(self._calls):
            call.drop(ConnectionFailed(f"{self.endpoint} does not answer any more"))

    async def close(self) -> None:
        """Closes the connections and cancels running requests."""
        self._closed = True
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _start(self, request: InferRequest, timeout_s: float | None) -> AsyncTokenStream:
        exchange = Exchange(request, str(self.endpoint), timeout_s, self._retry)
        return AsyncTokenStream(self._send, exchange)

    async def _ask(self, request: InferRequest, timeout_s: float | None) -> Outputs:
        """The only response to a request that is no job."""
        exchange = Exchange(request, str(self.endpoint), timeout_s, self._retry)
        while True:
            call = self._send(request, exchange.remaining_s())
            try:
                outputs = await anext(call, None)
                await anext(call, None)  # reads to the end: the connection can be used again
            except ClientError as error:
                delay_s = exchange.retry_delay_s(error)
                if delay_s is None:
                    raise
                await asyncio.sleep(delay_s)
            else:
                return exchange.only_response(outputs)
            finally:
                call.cancel()

    def _send(self, request: InferRequest, timeout_s: float | None) -> AioCall:
        if self._closed:
            raise ClientClosed("the client is closed")
        call = DroppableCall(self._transport.start(request, timeout_s), self._on_answer)
        self._calls.add(call)
        return call

    def _on_answer(self) -> None:
        self.num_answers += 1


class AsyncTokenStream(AsyncIterator[Chunk]):
    """The chunks of one request, as they arrive.

    The request, and nothing else, is cancelled on the server by leaving the ``async with`` block,
    by ``close()``, by cancelling the task that iterates, or by dropping the last reference.

    Iterating raises the same errors as iterating over a ``TokenStream``.
    """

    def __init__(
        self, send: Callable[[InferRequest, float | None], AioCall], exchange: Exchange
    ) -> None:
        """``send`` starts a call with the request and the seconds that it may take."""
        self._send = send
        self._exchange = exchange
        self._closed = asyncio.Event()
        self._call: AioCall | None = None
        self._start()

    async def __anext__(self) -> Chunk:
        try:
            return await self._next()
        except asyncio.CancelledError:
            self.close()
            raise

    async def _next(self) -> Chunk:
        assert self._call is not None
        while not self._closed.is_set():
            try:
                outputs = await anext(self._call)
                if is_large(outputs):
                    return await asyncio.to_thread(self._exchange.on_response, outputs)
                return self._exchange.on_response(outputs)
            except StopAsyncIteration:
                if not self._closed.is_set():
                    self._closed.set()
                    self._exchange.check_end()
            except ClientError as error:
                if self._closed.is_set():
                    break
                delay_s = self._exchange.retry_delay_s(error)
                if delay_s is None:
                    self._closed.set()
                    raise
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), delay_s)
                    break
                self._start()
        raise StopAsyncIteration

    def _start(self) -> None:
        self._call = self._send(self._exchange.request, self._exchange.remaining_s())

    def close(self) -> None:
        """Cancels the request if it still runs, and ends an iteration; idempotent."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        if self._call is not None:  # it was sent
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
