"""The state of one request in a client, without transports, threads or event loops."""

from __future__ import annotations

import time

from fastserve_client.errors import (
    ClientError,
    InvalidRequest,
    ServerError,
    ServerOverloaded,
    ServerUnavailable,
)
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs, read_chunk
from fastserve_client.results import Chunk
from fastserve_client.retry import RetryPolicy

# A longer timeout counts as no limit. gRPC would take it for a time that is over.
ENDLESS_S = 1e9


class Exchange:
    """One request, which may be sent several times, and its responses so far.

    Args:
        url: is named in messages.
        timeout_s: seconds for the whole exchange, which starts now.

    Raises:
        InvalidRequest: ``timeout_s`` is not above 0.
    """

    def __init__(
        self, request: InferRequest, url: str, timeout_s: float | None, retry: RetryPolicy
    ) -> None:
        self.request = request
        self._url = url
        if timeout_s is not None and not timeout_s > 0:  # in this form it refuses NaN
            raise InvalidRequest(
                f"timeout_s: got {timeout_s:g}; must be a number of seconds above 0"
            )
        self._deadline_s = None
        if timeout_s is not None and timeout_s < ENDLESS_S:
            self._deadline_s = time.monotonic() + timeout_s
        self._retry = retry
        self._num_retries = 0
        self._answered = False
        self._finished = False

    def remaining_s(self) -> float | None:
        """Seconds left of the timeout; ``None``: no limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def on_response(self, outputs: Outputs) -> Chunk:
        """Notes that a response has come, and returns its chunk.

        Raises:
            ServerError: the response cannot be read.
        """
        self._answered = True
        chunk = read_chunk(self.request.model, outputs)
        self._finished = chunk.finish_reason is not None
        return chunk

    def only_response(self, outputs: Outputs | None) -> Outputs:
        """The response to a request that has one. Raises ServerError if there is none."""
        if outputs is None:
            raise ServerError(f"{self._url} ended a request without an answer")
        return outputs

    def check_end(self) -> None:
        """Called when the server has closed the stream. Raises ServerError if that is too early."""
        if not self._finished:
            raise ServerError(f"{self._url} ended the stream before the job ended")

    def retry_delay_s(self, error: ClientError) -> float | None:
        """Seconds after which to send the request again; ``None``: ``error`` is final."""
        if self._answered or not isinstance(error, ServerUnavailable):
            return None
        delay_s = self._retry.delay_s(self._num_retries)
        if delay_s is not None and isinstance(error, ServerOverloaded):
            delay_s = max(delay_s, error.retry_after_s or 0.0)
        remaining_s = self.remaining_s()
        if delay_s is None or (remaining_s is not None and remaining_s <= delay_s):
            return None
        self._num_retries += 1
        return delay_s
