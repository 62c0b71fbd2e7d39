"""A running request that can be given up as if its connection had broken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from fastserve_client.errors import (
    ClientError,
    ConnectionFailed,
    RequestCancelled,
    RequestTimeout,
    ServerUnavailable,
)
from fastserve_client.response import Outputs
from fastserve_client.transport import AioCall


class DroppableCall(AsyncIterator[Outputs]):
    """An ``AioCall``.

    Args:
        on_answer: called with each response, and with an error of the model itself.
    """

    def __init__(self, call: AioCall, on_answer: Callable[[], None]) -> None:
        self._call = call
        self._on_answer = on_answer
        self._dropped: ConnectionFailed | None = None

    async def __anext__(self) -> Outputs:
        try:
            outputs = await anext(self._call)
        except (StopAsyncIteration, RequestCancelled):
            if self._dropped is not None:
                raise self._dropped from None
            raise
        except ClientError as error:
            if not isinstance(error, ServerUnavailable | RequestTimeout):
                self._on_answer()
            raise
        self._on_answer()
        return outputs

    def cancel(self) -> None:
        self._call.cancel()

    def drop(self, error: ConnectionFailed) -> None:
        """Cancels the request. Iterating raises ``error`` instead of the end."""
        self._dropped = error
        self._call.cancel()
