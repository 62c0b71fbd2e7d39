"""Requests and responses of the model in the JSON of Triton's generate extension.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from fastserve_client import protocol
from fastserve_client.errors import ClientError, error_from_http, error_from_message
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs, unreadable

_DATA = b"data:"


def stream_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/generate_stream"


def ready_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/ready"


def encode_request(request: InferRequest) -> bytes:
    """The body of a POST to ``stream_path``."""
    body: dict[str, Any] = {
        name: value.tolist() if isinstance(value, array) else value
        for name, value in request.inputs.items()
    }
    if request.request_id:
        body[protocol.REQUEST_ID] = request.request_id
    body |= request.trace_context  # the generate endpoints forward no headers
    return json.dumps(body, ensure_ascii=False).encode("utf-8")


class EventDecoder:
    """Reads the server-sent events of one answer. Triton sends each as one line."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Outputs | ClientError]:
        """The events that ``data`` completes: new text, or the error of the job.

        Raises:
            ServerError: an event cannot be read.
        """
        # Split bytes, not text: Unicode has more line separators, which JSON leaves as they are.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield self._decode(line.removeprefix(_DATA))

    def _decode(self, event: bytes) -> Outputs | ClientError:
        try:
            values = json.loads(event)
            if "error" in values:
                return error_from_message(str(values["error"]))
            # Triton writes a list of one element as the element.
            return {
                name: value if isinstance(value, list) else [value]
                for name, value in values.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise unreadable(self._model, error) from error


def refusal(url: str, status: int, body: bytes) -> ClientError:
    """The error for an answer whose status is not 200.

    The server's own errors have a JSON object as the body. The model's have it in an event.
    """
    try:
        message = json.loads(body.strip().removeprefix(_DATA))["error"]
    except (KeyError, TypeError, ValueError):
        message = None
    return error_from_http(url, status, message if isinstance(message, str) else None)
