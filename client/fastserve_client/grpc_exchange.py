"""What both gRPC clients know of one request; neither threads nor event loops are known here."""

from __future__ import annotations

import time
from typing import Any

import grpc

from fastserve_client.errors import (
    ClientError,
    ServerError,
    ServerUnavailable,
    error_from_message,
    error_from_status,
)
from fastserve_client.grpc_codec import parse_response
from fastserve_client.results import Chunk
from fastserve_client.retry import RetryPolicy

CHANNEL_OPTIONS = (
    # A prompt or a response can pass gRPC's default limit of 4 MiB; the server has its own limits.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # By default a channel that lost its server tries again after 1 s, and later after minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

READY_TIMEOUT_S = 5.0


class Exchange:
    """One request, sent once or, with retries, several times, and what came back so far.

    Args:
        request: a ``ModelInferRequest``.
        url: for messages.
        timeout_s: of the whole exchange, which starts now.
    """

    def __init__(self, request: Any, url: str, timeout_s: float | None, retry: RetryPolicy) -> None:
        self.request = request
        self._url = url
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._retry = retry
        self._num_retries = 0
        self._answered = False
        self._finished = False

    def remaining_s(self) -> float | None:
        """Seconds that are left of the timeout; ``None``: no limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def chunk(self, response: Any) -> Chunk:
        """What a ``ModelStreamInferResponse`` without ``error_message`` holds."""
        chunk = parse_response(response.infer_response)
        self._answered = True
        self._finished = chunk.finish_reason is not None
        return chunk

    def check_end(self) -> None:
        """The server has closed the stream. Raises ServerError if that is too early."""
        if not self._finished:
            raise ServerError(f"{self._url} ended the stream before the job ended")

    def message_error(self, message: str) -> ClientError:
        """The error that the server sent before it closes the stream."""
        self._finished = True
        return error_from_message(message)

    def status_error(self, error: grpc.RpcError) -> ClientError:
        """The error for the status with which the call ended."""
        return error_from_status(self._url, error.code().name, error.details() or "")

    def retry_delay_s(self, error: ClientError) -> float | None:
        """Seconds after which to send the request again; ``None``: ``error`` is final."""
        if self._answered or not isinstance(error, ServerUnavailable):
            return None
        delay_s = self._retry.delay_s(self._num_retries)
        remaining_s = self.remaining_s()
        if delay_s is None or (remaining_s is not None and remaining_s <= delay_s):
            return None
        self._num_retries += 1
        self._finished = False
        return delay_s
