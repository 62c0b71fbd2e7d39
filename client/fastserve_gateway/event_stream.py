"""Server-sent events that end when their client goes away."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from fastserve_client.errors import ClientError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fastserve_gateway.answer import event
from fastserve_gateway.disconnect import while_connected
from fastserve_gateway.errors import from_client_error


class EventStream(StreamingResponse):
    """Sends ``first`` and then ``events``.

    An error of a job becomes the last event. Calling the response raises ClientDisconnect when the
    client goes away. It closes ``events`` in any case.

    Args:
        field_names: see ``from_client_error``.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        field_names: Mapping[str, str],
    ) -> None:
        # A proxy that buffers or caches would delay the tokens.
        headers = {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._body(first), headers=headers, media_type="text/event-stream")
        self._events = events
        self._field_names = field_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        finally:
            await self._events.aclose()

    async def _body(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        try:
            async for one in self._events:
                yield one
        except ClientError as error:
            yield event(from_client_error(error, self._field_names).body)
