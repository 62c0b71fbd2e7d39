"""gRPC, synchronously."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
from grpc.experimental import ChannelOptions
from tritonclient.grpc import service_pb2, service_pb2_grpc

from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import error_from_message
from fastserve_client.exchange import ENDLESS_S
from fastserve_client.grpc_channel import END_S, open_channel, status_error, stream_method
from fastserve_client.grpc_codec import decode_response, encode_request, is_last
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs

# The thread that iterates over a call takes its events itself. By default another thread takes
# those of all calls, and each response wakes both. While a thread waits, signal handlers run within
# 0.2 s.
_EVENTS_TO_READER = (ChannelOptions.SingleThreadedUnaryStream, 1)


class GrpcTransport:
    """A ``Transport`` over one connection.

    Each request has a gRPC stream of its own (an HTTP/2 stream, not a connection). So cancelling, a
    deadline or an error touches one request, and the end of the stream is the end of that request.
    ``tritonclient``'s own client object holds one stream at a time. Requests multiplexed on it can
    only be cancelled all together, and one error of the transport ends them all. Only its messages
    are used, which it generates from Triton's protocol.
    """

    only_streams = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._url = str(endpoint)
        self._channel = open_channel(grpc, endpoint, _EVENTS_TO_READER)
        self._stream = stream_method(self._channel)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._ending: set[threading.Event] = set()

    def start(self, request: InferRequest, timeout_s: float | None) -> GrpcCall:
        metadata = tuple(request.trace_context.items())
        call = self._stream(encode_request(request), timeout=timeout_s, metadata=metadata)
        return GrpcCall(call, self._url, self._ending)

    def is_ready(self, model: str, timeout_s: float) -> bool:
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            return bool(self._stub.ModelReady(request, timeout=min(timeout_s, ENDLESS_S)).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        deadline = time.monotonic() + END_S
        for end in tuple(self._ending):
            end.wait(max(0.0, deadline - time.monotonic()))
        self._channel.close()


class GrpcCall(Iterator[Outputs]):
    """One ``ModelStreamInfer`` with one request.

    Args:
        ending: events for the ends of calls that have had their last response.
    """

    def __init__(self, call: Any, url: str, ending: set[threading.Event]) -> None:
        self._call = call
        self._url = url
        self._ending = ending
        self._has_last = False

    def __next__(self) -> Outputs:
        if self._has_last:
            raise StopIteration
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            raise status_error(self._url, error) from None
        if response.error_message or is_last(response.infer_response):
            self._read_end()
        if response.error_message:
            raise error_from_message(response.error_message)
        return decode_response(response.infer_response)

    def _read_end(self) -> None:
        # No other thread would, and a call that is dropped before its end cancels itself.
        self._has_last = True
        end = threading.Event()
        self._ending.add(end)
        try:
            with suppress(grpc.RpcError):
                next(self._call, None)
        finally:
            self._ending.discard(end)
            end.set()

    def cancel(self) -> None:
        if not self._has_last:
            self._call.cancel()
