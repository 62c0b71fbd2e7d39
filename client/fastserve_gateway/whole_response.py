"""A whole answer, which a slow client cannot leave in the gateway's memory uncounted."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from fastserve_gateway.body_parts import body_parts
from fastserve_gateway.json_pieces import json_pieces


class WholeResponse(JSONResponse):
    """JSON. Calling the response returns when the client has read all but the last part."""

    def render(self, content: Any) -> bytes:
        try:
            return "".join(json_pieces(content)).encode()
        except UnicodeEncodeError:
            # Arguments of a call may have half of a pair of surrogates, as the model wrote it. Only
            # an escape can hold it.
            return "".join(json_pieces(content, ensure_ascii=True)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        for part in body_parts(bytes(self.body)):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
