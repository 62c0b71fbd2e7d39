"""The synchronous gRPC client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from fastserve_client import protocol
from fastserve_client.endpoint import DEFAULT_URL, Endpoint
from fastserve_client.errors import ServerUnavailable
from fastserve_client.grpc_codec import build_request
from fastserve_client.grpc_exchange import CHANNEL_OPTIONS, READY_TIMEOUT_S, Exchange
from fastserve_client.results import Chunk, Completion
from fastserve_client.retry import RetryPolicy

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from fastserve_client.options import Prompt, SamplingOptions


class FastServeClient:
    """Sends prompts to the model ``fastserve`` of a tritonserver.

    All requests share one connection, and each has a gRPC stream (an HTTP/2 stream, not a
    connection) of its own, opened through the stub that ``tritonclient`` generates from Triton's
    protocol. ``tritonclient``'s own client object holds one stream at a time: requests
    multiplexed on it could only be cancelled all together, and one error of the transport would
    end them all. With a stream each, cancelling, a deadline or an error touches one request, and
    the end of the stream is the end of that request.

    Thread-safe. Connecting is lazy: a wrong address shows at the first request.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, model: str = protocol.MODEL_NAME, max_retries: int = 0
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: ``grpc://HOST[:PORT]``.
            model: its name in the server's model repository.
            max_retries: how often a request is sent again that the server did not take; see
                ``RetryPolicy``.

        Raises:
            InvalidRequest: the URL cannot be understood, or ``max_retries`` is negative.
        """
        self.endpoint = Endpoint.parse(url)
        self.model = model
        self._retry = RetryPolicy(max_retries)
        self._channel = grpc.insecure_channel(self.endpoint.target, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        perf_metrics: bool = False,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Sends the request now and returns an iterator over its chunks.

        Args:
            prompt: text, token ids, or a conversation (a list of ``{"role": …, "content": …}``)
                for the model's chat template.
            timeout_s: seconds for the whole request; ``None`` waits as long as it takes.
            perf_metrics: the last chunk carries the server's ``PerfMetrics``.
            request_id: appears in the server's logs; by default the server makes one up.
            **sampling: see ``SamplingOptions``.

        Raises:
            InvalidRequest: the request cannot be sent. (What the server refuses is raised by the
                iteration, as are its other errors: see ``TokenStream``.)
            TypeError: an unknown option.
        """
        return self._start(
            build_request(
                self.model,
                prompt,
                sampling,
                stream=True,
                perf_metrics=perf_metrics,
                request_id=request_id,
            ),
            timeout_s,
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        perf_metrics: bool = False,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The whole completion, in one response. Arguments as ``stream``, errors of both."""
        request = build_request(
            self.model,
            prompt,
            sampling,
            stream=False,
            perf_metrics=perf_metrics,
            request_id=request_id,
        )
        with self._start(request, timeout_s) as chunks:
            return Completion.from_chunks(chunks)

    def is_ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Whether the server says that the model takes requests; False also where none answers."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            return bool(self._stub.ModelReady(request, timeout=timeout_s).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Closes the connection; what still runs is cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, request: Any, timeout_s: float | None) -> TokenStream:
        exchange = Exchange(request, str(self.endpoint), timeout_s, self._retry)
        return TokenStream(self._stub.ModelStreamInfer, exchange)


class TokenStream(Iterator[Chunk]):
    """The chunks of one request, as they arrive.

    Leaving the ``with`` block, ``close()``, or dropping the last reference before the end cancels
    the request on the server, and nothing else. ``close()`` may be called from another thread or
    a signal handler; a blocked iteration then ends.

    Iterating raises:
        InvalidRequest, ServerUnavailable, ServerOverloaded, ConnectionFailed, RequestTimeout,
        RequestCancelled, ServerError: see ``fastserve_client.errors``.
    """

    def __init__(self, infer: Callable[..., Any], exchange: Exchange) -> None:
        """``infer``: the stub's ``ModelStreamInfer``."""
        self._infer = infer
        self._exchange = exchange
        self._closed = threading.Event()
        self._call = self._send()

    def __next__(self) -> Chunk:
        while not self._closed.is_set():
            try:
                return self._receive()
            except ServerUnavailable as error:
                delay_s = self._exchange.retry_delay_s(error)
                if delay_s is None:
                    raise
                self._closed.wait(delay_s)
                self._call = self._send()
                if self._closed.is_set():  # close() may have met the call before
                    self._call.cancel()
        raise StopIteration

    def _send(self) -> Any:
        # The iterator of one request ends at once, which half-closes the stream: the server then
        # closes its side after the last response, and no final marker has to be waited for.
        exchange = self._exchange
        return self._infer(iter((exchange.request,)), timeout=exchange.remaining_s())

    def _receive(self) -> Chunk:
        try:
            response = next(self._call)
        except StopIteration:
            self._exchange.check_end()
            raise
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise StopIteration from None
            raise self._exchange.status_error(error) from None
        if response.error_message:
            self._await_end()
            raise self._exchange.message_error(response.error_message)
        return self._exchange.chunk(response)

    def _await_end(self) -> None:
        # The server is about to end the stream. Cancelling in that moment was seen to make
        # tritonserver 24.10 count the request as running for ever, so that it cannot unload.
        with suppress(grpc.RpcError):
            for _ in self._call:
                pass

    def close(self) -> None:
        """Cancels the request if it still runs; idempotent."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
