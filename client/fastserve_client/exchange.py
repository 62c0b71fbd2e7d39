"""What every client knows of one request; neither transports, threads nor event loops."""

from __future__ import annotations

import time

from fastserve_client.errors import ClientError, InvalidRequest, ServerError, ServerUnavailable
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs, read_chunk
from fastserve_client.results import Chunk
from fastserve_client.retry import RetryPolicy

# More than this, infinity too, is no limit: gRPC takes it for a time that is over.
ENDLESS_S = 1e9


class Exchange:
    """One request, sent once or, with retries, several times, and what came back so far.

    Args:
        url: for messages.
        timeout_s: of the whole exchange, which starts now.

    Raises:
        InvalidRequest: ``timeout_s`` is not above 0.
    """

    def __init__(
        self, request: InferRequest, url: str, timeout_s: float | None, retry: RetryPolicy
    ) -> None:
        self.request = request
        self._url = url
        if timeout_s is not None and not timeout_s > 0:  # so that NaN is refused
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
        """Seconds that are left of the timeout; ``None``: no limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def received(self, outputs: Outputs) -> Chunk:
        """Notes that a response has come, and returns what is in it.

        Raises:
            ServerError: it cannot be read.
        """
        self._answered = True
        chunk = read_chunk(self.request.model, outputs)
        self._finished = chunk.finish_reason is not None
        return chunk

    def check_end(self) -> None:
        """The server has closed the stream. Raises ServerError if that is too early."""
        if not self._finished:
            raise ServerError(f"{self._url} ended the stream before the job ended")

    def retry_delay_s(self, error: ClientError) -> float | None:
        """Seconds after which to send the request again; ``None``: ``error`` is final."""
        if self._answered or not isinstance(error, ServerUnavailable):
            return None
        delay_s = self._retry.delay_s(self._num_retries)
        remaining_s = self.remaining_s()
        if delay_s is None or (remaining_s is not None and remaining_s <= delay_s):
            return None
        self._num_retries += 1
        return delay_s
