"""Watching the engine, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING

from fastserve_client.engine_state import EngineState
from fastserve_client.errors import ClientError, ServerError
from fastserve_client.request import InferRequest
from fastserve_client.response import read_engine_state, read_picture
from fastserve_client.transport import AioCall

if TYPE_CHECKING:
    from typing import Self


class AsyncEngineWatch(AsyncIterator[EngineState]):
    """Pictures of the engine, until it is closed or an error is raised.

    The server ends a watch after some seconds. This object then asks again by itself.

    The watch ends on the server by leaving the ``async with`` block, by ``close()``, by cancelling
    the task that iterates, or by dropping the last reference.

    Iterating raises:
        InvalidRequest, ServerUnavailable (too many watches, or a shutdown), ConnectionFailed,
        RequestCancelled, ServerError: see ``fastserve_client.errors``.
    """

    def __init__(
        self, send: Callable[[InferRequest, float | None], AioCall], request: InferRequest, url: str
    ) -> None:
        """
        Args:
            send: starts a call with the request and the seconds that it may take.
            request: a request with ``watch_interval_ms``.
            url: is named in messages.
        """
        self._send = send
        self._request = request
        self._url = url
        self._closed = False
        self._call: AioCall | None = None
        self._had_picture = False

    async def __anext__(self) -> EngineState:
        return read_picture(self._request.model, await self.next_json())

    async def next_json(self) -> str:
        """The next picture as JSON, to pass it on. Raises the errors of iterating."""
        while not self._closed:
            if self._call is None:
                self._call = self._send(self._request, None)
                self._had_picture = False
            try:
                outputs = await anext(self._call)
            except StopAsyncIteration:
                self._call = None
                if not self._had_picture and not self._closed:
                    raise ServerError(f"{self._url} ended a watch before it began") from None
                continue
            except asyncio.CancelledError:
                self.close()
                raise
            except ClientError:
                self._call = None
                raise
            self._had_picture = True
            return read_engine_state(self._request.model, outputs)
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends the watch and a running iteration; idempotent."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        if self._call is not None:
            self._call.cancel()  # its objects refer to each other, so dropping it is not enough

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
