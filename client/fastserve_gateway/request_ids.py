"""The header ``x-request-id``, by which a client's log and a proxy's find one request."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"
_ANTHROPICS_HEADER = "request-id"
_MAX_CHARS = 128


class RequestIds:
    """ASGI middleware. Each answer has the id of its request, or a new one if it came without."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        is_usable = 0 < len(given) <= _MAX_CHARS and given.isascii() and given.isprintable()
        request_id = given if is_usable else f"req_{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[_HEADER] = headers[_ANTHROPICS_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
