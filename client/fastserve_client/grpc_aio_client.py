"""The asyncio gRPC client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from fastserve_client import protocol
from fastserve_client.endpoint import DEFAULT_URL, Endpoint
from fastserve_client.errors import RequestCancelled, ServerUnavailable
from fastserve_client.grpc_aio_watch import AsyncEngineWatch
from fastserve_client.grpc_codec import build_request, build_watch_request
from fastserve_client.grpc_exchange import CHANNEL_OPTIONS, READY_TIMEOUT_S, Exchange
from fastserve_client.results import Chunk, Completion
from fastserve_client.retry import RetryPolicy

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from fastserve_client.options import Prompt, SamplingOptions


class AsyncFastServeClient:
    """``FastServeClient`` for asyncio: the same arguments, results and errors.

    It belongs to the event loop in which it is made, and is not thread-safe. All requests share
    one connection, and each has a gRPC stream of its own. Connecting is lazy.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, model: str = protocol.MODEL_NAME, max_retries: int = 0
    ) -> None:
        """Connects to nothing yet. Arguments as of ``FastServeClient``.

        Raises:
            InvalidRequest: the URL cannot be understood, or ``max_retries`` is negative.
            RuntimeError: no event loop runs.
        """
        asyncio.get_running_loop()
        self.endpoint = Endpoint.parse(url)
        self.model = model
        self._retry = RetryPolicy(max_retries)
        self._channel = grpc.aio.insecure_channel(self.endpoint.target, options=CHANNEL_OPTIONS)
        self._closed = asyncio.Event()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        perf_metrics: bool = False,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncTokenStream:
        """Sends the request and returns an asynchronous iterator over its chunks.

        Not a coroutine: ``async for chunk in client.stream(…)``. Arguments and errors as of
        ``FastServeClient.stream``.
        """
        request = build_request(
            self.model,
            prompt,
            sampling,
            stream=True,
            perf_metrics=perf_metrics,
            request_id=request_id,
        )
        return self._start(request, timeout_s)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        perf_metrics: bool = False,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The whole completion, in one response. Arguments as ``stream``, errors of both.

        Cancelling the task that awaits it cancels the request.
        """
        request = build_request(
            self.model,
            prompt,
            sampling,
            stream=False,
            perf_metrics=perf_metrics,
            request_id=request_id,
        )
        async with self._start(request, timeout_s) as chunks:
            return Completion.from_chunks([chunk async for chunk in chunks])

    def watch(self, interval_s: float = 0.5) -> AsyncEngineWatch:
        """Pictures of the engine, one every ``interval_s`` seconds (from 0.05 to 10).

        Not a coroutine: ``async for state in client.watch()``. It is no job and needs no place in
        the queue; the server takes a few watchers at a time.

        Raises:
            InvalidRequest: the interval is no number of seconds. (What the server refuses is
                raised by the iteration: see ``AsyncEngineWatch``.)
        """
        request = build_watch_request(self.model, interval_s)
        return AsyncEngineWatch(
            self._stub.ModelStreamInfer, request, str(self.endpoint), self._closed
        )

    async def is_ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Whether the server says that the model takes requests; False also where none answers."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            answer = await self._stub.ModelReady(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    async def close(self) -> None:
        """Closes the connection; what still runs is cancelled."""
        self._closed.set()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _start(self, request: Any, timeout_s: float | None) -> AsyncTokenStream:
        exchange = Exchange(request, str(self.endpoint), timeout_s, self._retry)
        return AsyncTokenStream(self._stub.ModelStreamInfer, exchange, self._closed)


class AsyncTokenStream(AsyncIterator[Chunk]):
    """The chunks of one request, as they arrive.

    Leaving the ``async with`` block, ``close()``, cancelling the task that iterates, or dropping
    the last reference before the end cancels the request on the server, and nothing else.

    Iterating raises what iterating a ``TokenStream`` does.
    """

    def __init__(
        self, infer: Callable[..., Any], exchange: Exchange, client_closed: asyncio.Event
    ) -> None:
        """``infer``: the stub's ``ModelStreamInfer``."""
        self._infer = infer
        self._exchange = exchange
        self._client_closed = client_closed
        self._closed = asyncio.Event()
        self._call: Any = None
        self._send()

    async def __anext__(self) -> Chunk:
        while not self._closed.is_set():
            try:
                return await self._receive()
            except ServerUnavailable as error:
                delay_s = self._exchange.retry_delay_s(error)
                if delay_s is None:
                    raise
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), delay_s)
                break
            self._send()
        raise StopAsyncIteration

    def _send(self) -> None:
        # The request's side of the stream is closed behind the only request, and the server closes
        # its own after the last response: no final marker has to be waited for.
        exchange = self._exchange
        self._call = self._infer((exchange.request,), timeout=exchange.remaining_s())
        self._responses = aiter(self._call)

    async def _receive(self) -> Chunk:
        try:
            response = await anext(self._responses)
        except StopAsyncIteration:
            self._exchange.check_end()
            raise
        except asyncio.CancelledError:
            # gRPC reports a call that close() has cancelled as it does a cancelled task.
            if not _task_is_cancelled():
                if self._closed.is_set():
                    raise StopAsyncIteration from None
                if self._client_closed.is_set():
                    raise RequestCancelled("the client was closed") from None
            self._call.cancel()
            raise
        except grpc.RpcError as error:
            raise self._exchange.status_error(error) from None
        if response.error_message:
            await self._await_end()
            raise self._exchange.message_error(response.error_message)
        return self._exchange.chunk(response)

    async def _await_end(self) -> None:
        # As TokenStream does, and for the same reason.
        with suppress(grpc.RpcError):
            async for _ in self._responses:
                pass

    def close(self) -> None:
        """Cancels the request if it still runs, and ends an iteration; idempotent."""
        self._closed.set()
        self._call.cancel()

    def __del__(self) -> None:
        if self._call is not None:  # gRPC refused a client that is closed
            self._call.cancel()  # its own objects refer to each other, and live on

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _task_is_cancelled() -> bool:
    # Python 3.10 cannot tell; there a stream that was closed just ends, also in a cancelled task.
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0
