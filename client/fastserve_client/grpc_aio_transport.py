"""gRPC for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import ClientClosed, error_from_message
from fastserve_client.exchange import ENDLESS_S
from fastserve_client.grpc_channel import END_S, open_channel, status_error, stream_method
from fastserve_client.grpc_codec import decode_response, encode_request, is_last
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs


class AioGrpcTransport:
    """An ``AioTransport`` over one connection, with a gRPC stream for each request."""

    only_streams = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._url = str(endpoint)
        self._channel = open_channel(grpc.aio, endpoint)
        self._stream = stream_method(self._channel)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._closed = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, request: InferRequest, timeout_s: float | None) -> AioGrpcCall:
        metadata = tuple(request.trace_context.items())
        call = self._stream(encode_request(request), timeout=timeout_s, metadata=metadata)
        return AioGrpcCall(call, self._url, self._closed, self._ending)

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            answer = await self._stub.ModelReady(request, timeout=min(timeout_s, ENDLESS_S))
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    async def close(self) -> None:
        self._closed.set()
        try:
            if self._ending:
                await asyncio.wait(self._ending, timeout=END_S)
        finally:
            await self._channel.close()


class AioGrpcCall(AsyncIterator[Outputs]):
    """One ``ModelStreamInfer`` with one request.

    Args:
        ending: tasks that read to the end, of calls that have had their last response.
    """

    def __init__(
        self, call: Any, url: str, transport_closed: asyncio.Event, ending: set[asyncio.Task[None]]
    ) -> None:
        self._call = call
        self._responses = aiter(call)
        self._url = url
        self._transport_closed = transport_closed
        self._ending = ending
        self._cancelled = False
        self._end: asyncio.Task[None] | None = None  # set when the last response has come

    async def __anext__(self) -> Outputs:
        if self._end is not None:
            await self._await_end()
            raise StopAsyncIteration
        # A task of its own reads, and ends with the call. If the task of a read is cancelled,
        # grpcio 1.85 never frees its memory (github.com/grpc/grpc/issues/43360).
        read = asyncio.ensure_future(self._read())
        # Nobody waits for it any more if the call is cancelled; asyncio would log its error then.
        read.add_done_callback(_take_error)
        try:
            response = await asyncio.shield(read)
        except asyncio.CancelledError:
            # gRPC reports a cancelled call like a cancelled task.
            if not _task_is_cancelled():
                if self._cancelled:
                    raise StopAsyncIteration from None
                if self._transport_closed.is_set():
                    raise ClientClosed("the client was closed") from None
            self.cancel()
            raise
        except grpc.RpcError as error:
            raise status_error(self._url, error) from None
        if response.error_message:
            await self._await_end()
            raise error_from_message(response.error_message)
        return decode_response(response.infer_response)

    async def _read(self) -> Any:
        """The next ``ModelStreamInferResponse``. After the last one a task reads to the end."""
        response = await anext(self._responses)
        if response.error_message or is_last(response.infer_response):
            self._end = asyncio.ensure_future(self._read_to_end())
            self._ending.add(self._end)
            self._end.add_done_callback(self._ending.discard)
        return response

    async def _read_to_end(self) -> None:
        with suppress(grpc.RpcError):
            async for _ in self._responses:
                pass

    async def _await_end(self) -> None:
        # Not ``wait_for``: cancelling the waiting task must not cancel the call.
        assert self._end is not None
        await asyncio.wait((self._end,), timeout=END_S)

    def cancel(self) -> None:
        self._cancelled = True
        if self._end is None:
            self._call.cancel()


def _take_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
