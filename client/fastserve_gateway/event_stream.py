"""Server-sent events that end when their client goes away."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from fastserve_client.errors import ClientError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fastserve_gateway.body_parts import body_parts
from fastserve_gateway.disconnect import while_connected


class EventStream(StreamingResponse):
    """Sends ``first`` and then ``events``.

    An error of a job becomes the last event. Calling the response raises ClientDisconnect when the
    client goes away. It closes ``events`` in any case.

    Args:
        last_event: the event for an error of a job.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        last_event: Callable[[ClientError], bytes],
    ) -> None:
        # A proxy that buffers or caches would delay the tokens.
        headers = {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._body(first), headers=headers, media_type="text/event-stream")
        self._events = events
        self._last_event = last_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        finally:
            await self._events.aclose()

    async def _body(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        try:
            async for one in self._events:
                for part in body_parts(one):
                    yield part
        except ClientError as error:
            yield self._last_event(error)
