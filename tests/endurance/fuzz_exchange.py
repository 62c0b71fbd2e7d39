"""Sends requests byte by byte as they are, and records the answers."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import grpc
from fuzzed_grpc import INFER, GrpcCall
from fuzzed_http import HttpRequest
from fuzzed_requests import Request
from tritonclient.grpc import service_pb2

DEADLINE_S = 120.0
CLOSED, LATE = "closed", "late"
"""Kinds of failure: the connection ended without a whole answer, or no answer came in time."""
_CALLS = "/inference.GRPCInferenceService/"
_WATCHED = b'"engine_state"'


@dataclass(frozen=True)
class Outcome:
    status: int | str
    seconds: float = 0.0
    content_type: str = ""
    body: bytes = b""
    """The whole body of an HTTP answer."""
    messages: tuple[str, ...] = ()
    """Messages of a gRPC call's errors and of its end."""
    num_responses: int = 0
    was_watched: bool = False
    """Whether the server kept sending its state until the client left."""


class Sender:
    """Sends requests; any number of threads may use it."""

    def __init__(self, urls: dict[str, str], channel: grpc.Channel) -> None:
        """``urls``: those of the HTTP services."""
        self._addresses = {name: urlsplit(url) for name, url in urls.items()}
        self._channel = channel

    def send(self, request: Request) -> Outcome:
        began_s = time.monotonic()
        is_http = isinstance(request, HttpRequest)
        outcome = self._over_http(request) if is_http else self._over_grpc(request)
        return replace(outcome, seconds=time.monotonic() - began_s)

    def _over_http(self, request: HttpRequest) -> Outcome:
        address = self._addresses[request.service]
        connection = socket.create_connection((address.hostname, address.port), DEADLINE_S)
        with connection:
            # A server that refuses a request may close the connection before all of it is sent.
            with suppress(OSError):
                connection.sendall(request.payload)
                if not request.is_framed:  # else the server would wait for the rest
                    connection.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(connection, method=request.method)
            try:
                answer.begin()
                body = _read(answer)
            except TimeoutError:
                return Outcome(LATE)
            except (http.client.HTTPException, ConnectionError):
                return Outcome(CLOSED)
            return Outcome(answer.status, 0.0, answer.getheader("Content-Type", ""), body)

    def _over_grpc(self, request: GrpcCall) -> Outcome:
        path = _CALLS + request.method
        if request.method != INFER:
            single = self._channel.unary_unary(path, _registered_method=False)
            try:
                single(request.messages[0], DEADLINE_S, request.metadata)
            except grpc.RpcError as error:
                return _ended(error, [], 0)
            return Outcome("OK", num_responses=1)
        stream = self._channel.stream_stream(path)
        call = stream(iter(request.messages), DEADLINE_S, request.metadata)
        messages, num_responses = [], 0
        try:
            for encoded in call:
                num_responses += 1
                response = service_pb2.ModelStreamInferResponse.FromString(encoded)
                messages += [response.error_message] if response.error_message else []
                if any(output.name == "engine_state" for output in response.infer_response.outputs):
                    call.cancel()  # such an answer would never end
                    return Outcome("OK", num_responses=num_responses, was_watched=True)
        except grpc.RpcError as error:
            return _ended(error, messages, num_responses)
        return Outcome("OK", messages=tuple(messages), num_responses=num_responses)


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Reads the whole body. Raises http.client.IncompleteRead, TimeoutError."""
    deadline_s = time.monotonic() + DEADLINE_S
    body = b""
    while part := answer.read1(1 << 16):
        body += part
        if _WATCHED in body and body.endswith(b"\n\n"):
            break  # the stream would never end
        if time.monotonic() > deadline_s:
            raise TimeoutError
    return body


def _ended(error: grpc.RpcError, messages: list[str], num_responses: int) -> Outcome:
    code = error.code()
    status = LATE if code is grpc.StatusCode.DEADLINE_EXCEEDED else code.name
    return Outcome(status, messages=(*messages, error.details() or ""), num_responses=num_responses)
