"""Watching the engine over gRPC, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from fastserve_client.engine_state import EngineState
from fastserve_client.errors import (
    RequestCancelled,
    ServerError,
    error_from_message,
    error_from_status,
)
from fastserve_client.grpc_codec import parse_engine_state

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncEngineWatch(AsyncIterator[EngineState]):
    """Pictures of the engine, until it is closed or an error is raised.

    The server ends a watch after some seconds; this one then asks again by itself.

    Leaving the ``async with`` block, ``close()``, cancelling the task that iterates, or dropping
    the last reference ends the watch on the server.

    Iterating raises:
        InvalidRequest, ServerUnavailable (too many watch, or it shuts down), ConnectionFailed,
        RequestCancelled, ServerError: see ``fastserve_client.errors``.
    """

    def __init__(
        self, infer: Callable[..., Any], request: Any, url: str, client_closed: asyncio.Event
    ) -> None:
        """
        Args:
            infer: the stub's ``ModelStreamInfer``.
            request: a ``ModelInferRequest`` that watches.
            url: for messages.
        """
        self._infer = infer
        self._request = request
        self._url = url
        self._client_closed = client_closed
        self._closed = False
        self._call: Any = None
        self._responses: Any = None
        self._had_picture = False

    async def __anext__(self) -> EngineState:
        return EngineState.from_json(await self.next_json())

    async def next_json(self) -> str:
        """The next picture as it came, for those who pass it on. Errors as of iterating."""
        while not self._closed:
            if self._call is None:
                self._call = self._infer((self._request,))
                self._responses = aiter(self._call)
                self._had_picture = False
            try:
                return await self._receive()
            except StopAsyncIteration:
                self._call = None
                if not self._had_picture and not self._closed:
                    raise ServerError(f"{self._url} ended a watch before it began") from None
        raise StopAsyncIteration

    async def _receive(self) -> str:
        try:
            response = await anext(self._responses)
        except asyncio.CancelledError:
            # gRPC reports a call that was cancelled here as it does a cancelled task.
            if self._closed:
                raise StopAsyncIteration from None
            if self._client_closed.is_set():
                raise RequestCancelled("the client was closed") from None
            self._call.cancel()
            raise
        except grpc.RpcError as error:
            self._call = None
            raise error_from_status(self._url, error.code().name, error.details() or "") from None
        if response.error_message:
            await self._await_end()
            raise error_from_message(response.error_message)
        self._had_picture = True
        return parse_engine_state(response.infer_response)

    async def _await_end(self) -> None:
        # Cancelling a call that the server is about to end can keep it from unloading.
        with suppress(grpc.RpcError):
            async for _ in self._responses:
                pass
        self._call = None

    def close(self) -> None:
        """Ends the watch and an iteration; idempotent."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        if self._call is not None:
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
