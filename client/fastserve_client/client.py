"""The synchronous client."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from fastserve_client import protocol
from fastserve_client.endpoint import DEFAULT_URL, Endpoint
from fastserve_client.errors import ClientClosed, ClientError
from fastserve_client.exchange import Exchange
from fastserve_client.request import (
    InferRequest,
    build_description_request,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
)
from fastserve_client.response import (
    Outputs,
    read_description,
    read_detokenization,
    read_tokenization,
)
from fastserve_client.results import Chunk, Completion, Tokenization
from fastserve_client.retry import RetryPolicy
from fastserve_client.transport import Call, open_transport

if TYPE_CHECKING:
    from typing import Self, Unpack

    from fastserve_client.model_description import ModelDescription
    from fastserve_client.options import ChatTemplateOptions, Message, Prompt, RequestOptions

READY_TIMEOUT_S = 5.0


class FastServeClient:
    """Sends prompts to the model ``fastserve`` of a tritonserver, by gRPC or by HTTP.

    Results, errors and arguments are the same for both; docs/clients.md lists the differences.
    Over gRPC all requests share one connection. Over HTTP each running request has its own.

    It is thread-safe. It connects at the first request, so a wrong address shows only then.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, model: str = protocol.MODEL_NAME, max_retries: int = 0
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: ``grpc://HOST[:PORT]`` or ``http://HOST[:PORT]``; with TLS ``grpcs://`` or
                ``https://``.
            model: the model's name in the server's model repository.
            max_retries: how often to repeat a request that the server did not take; see
                ``RetryPolicy``.

        Raises:
            InvalidRequest: the URL cannot be understood, or ``max_retries`` is negative.
        """
        self.endpoint = Endpoint.parse(url)
        self.model = model
        self._retry = RetryPolicy(max_retries)
        self._transport = open_transport(self.endpoint)
        self._closed = False

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        perf_metrics: bool = False,
        request_id: str = "",
        trace_context: Mapping[str, str] | None = None,
        output_ids_so_far: Sequence[int] = (),
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """Sends the request now and returns an iterator over its chunks.

        Args:
            prompt: text, token ids, or a conversation (a list of ``{"role": …, "content": …}``)
                for the model's chat template.
            timeout_s: seconds for the whole request, above 0; ``None`` sets no limit.
            perf_metrics: true adds the server's ``PerfMetrics`` to the last chunk.
            request_id: appears in the server's logs; by default the server makes one up.
            trace_context: the headers ``traceparent`` and ``tracestate``, as OpenTelemetry's
                ``inject`` writes them. The job's spans become part of that trace.
            output_ids_so_far: the answer goes on after these tokens, which came from a server that
                was lost. The chunks have the rest. Give the same prompt and options, and a seed.
            **options: see ``SamplingOptions`` and ``ServiceOptions``.

        Raises:
            InvalidRequest: the request cannot be sent. (Iterating raises the server's refusals and
                other errors: see ``TokenStream``.)
            TypeError: an unknown option.
            ClientClosed: the client is closed. It is a RequestCancelled.
        """
        return self._start(
            build_request(
                self.model,
                prompt,
                options,
                stream=True,
                perf_metrics=perf_metrics,
                request_id=request_id,
                trace_context=trace_context,
                output_ids_so_far=output_ids_so_far,
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
        trace_context: Mapping[str, str] | None = None,
        output_ids_so_far: Sequence[int] = (),
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Returns the whole completion. It has the arguments of ``stream``, and its errors."""
        request = build_request(
            self.model,
            prompt,
            options,
            stream=self._transport.only_streams,
            perf_metrics=perf_metrics,
            request_id=request_id,
            trace_context=trace_context,
            output_ids_so_far=output_ids_so_far,
        )
        with self._start(request, timeout_s) as chunks:
            return Completion.from_chunks(chunks)

    def describe(self, *, timeout_s: float | None = None) -> ModelDescription:
        """What the server says about its model. It has the errors of ``generate``."""
        outputs = self._ask(build_description_request(self.model), timeout_s)
        return read_description(self.model, outputs)

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        return_token_strs: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[ChatTemplateOptions],
    ) -> Tokenization:
        """The tokens of a text, which may be empty, or of a conversation. No job is started.

        Args:
            prompt: text or a conversation, as for ``stream``.
            add_special_tokens: see ``SamplingOptions``.
            return_token_strs: also return the text of each token.
            timeout_s: as for ``stream``.
            **options: of a conversation; see ``ChatTemplateOptions``.

        Raises:
            InvalidRequest: the server refuses the prompt, or it is far too long. The other errors
                are those of ``generate``.
        """
        request = build_tokenize_request(
            self.model,
            prompt,
            {**options, protocol.ADD_SPECIAL_TOKENS: add_special_tokens},
            return_token_strs=return_token_strs,
        )
        return read_tokenization(self.model, self._ask(request, timeout_s))

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of at least one token. Special tokens have theirs, as a prompt spells them.

        It has the errors of ``generate``.
        """
        request = build_detokenize_request(self.model, token_ids)
        return read_detokenization(self.model, self._ask(request, timeout_s))

    def is_ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Whether the server says that the model takes requests; False if none answers."""
        return not self._closed and self._transport.is_ready(self.model, timeout_s)

    def close(self) -> None:
        """Closes the connections and cancels running requests."""
        self._closed = True
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, request: InferRequest, timeout_s: float | None) -> TokenStream:
        exchange = Exchange(request, str(self.endpoint), timeout_s, self._retry)
        return TokenStream(self._send, exchange)

    def _ask(self, request: InferRequest, timeout_s: float | None) -> Outputs:
        """The only response to a request that is no job."""
        exchange = Exchange(request, str(self.endpoint), timeout_s, self._retry)
        while True:
            call = self._send(request, exchange.remaining_s())
            try:
                outputs = next(call, None)
                next(call, None)  # reads to the end, so that the connection can be used again
            except ClientError as error:
                delay_s = exchange.retry_delay_s(error)
                if delay_s is None:
                    raise
                time.sleep(delay_s)
            else:
                return exchange.only_response(outputs)
            finally:
                call.cancel()

    def _send(self, request: InferRequest, timeout_s: float | None) -> Call:
        if self._closed:
            raise ClientClosed("the client is closed")
        return self._transport.start(request, timeout_s)


class TokenStream(Iterator[Chunk]):
    """The chunks of one request, as they arrive.

    The request, and nothing else, is cancelled on the server by leaving the ``with`` block, by
    ``close()``, or by dropping the last reference. ``close()`` may be called from another thread or
    a signal handler. A blocked iteration then ends.

    Iterating raises:
        InvalidRequest, ServerUnavailable, ServerOverloaded, ConnectionFailed, RequestTimeout,
        RequestCancelled, ServerError: see ``fastserve_client.errors``.
    """

    def __init__(
        self, send: Callable[[InferRequest, float | None], Call], exchange: Exchange
    ) -> None:
        """``send`` starts a call with the request and the seconds that it may take."""
        self._send = send
        self._exchange = exchange
        # No Event: a signal handler may interrupt the thread that holds its lock.
        self._closed = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._call: Call | None = None
        self._start()

    def __next__(self) -> Chunk:
        assert self._call is not None
        while not self._closed:
            try:
                return self._exchange.on_response(next(self._call))
            except StopIteration:
                if not self._closed:
                    self._closed = True
                    self._exchange.check_end()
            except ClientError as error:
                if self._closed:
                    break
                delay_s = self._exchange.retry_delay_s(error)
                if delay_s is None:
                    self._closed = True
                    raise
                with suppress(queue.Empty):
                    self._wakes.get(timeout=delay_s)
                if self._closed:
                    break
                self._start()
                if self._closed:  # close() may have cancelled the call before this one
                    self.close()
        raise StopIteration

    def _start(self) -> None:
        self._call = self._send(self._exchange.request, self._exchange.remaining_s())

    def close(self) -> None:
        """Cancels the request if it still runs; idempotent."""
        self._closed = True
        self._wakes.put(None)
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        if self._call is not None:  # it was sent
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
