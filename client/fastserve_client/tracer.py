"""Makes OpenTelemetry's spans and sends them to a collector. Needs the extra ``traces``."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

logger = logging.getLogger(__name__)

Attributes = Mapping[str, AttributeValue]
Carrier = Mapping[str, str | Sequence[str]]
"""Headers of W3C's trace context by name; names are in lower case. It may have other headers."""

CLOSE_TIMEOUT_S = 1.0
"""How long ``Tracer.close`` tries to send the last spans. A server that stops waits for it."""

_SCOPE = "fastserve"
_W3C = TraceContextTextMapPropagator()
# These log each failed attempt, each malformed header and each dropped span. ``_Sender`` and
# ``Tracer.close`` log what an operator needs.
_TALKATIVE = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal", "opentelemetry.trace")


class Tracer:
    """Spans of one process. All methods are thread-safe; ``close`` it at the end.

    A thread of its own sends the spans. Spans are dropped while the queue is full, which holds
    ``OTEL_BSP_MAX_QUEUE_SIZE``, and while the collector does not answer.

    Args:
        service_name: of the spans, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES``
            has another one.
        destination: where the exporter sends, for the log.
    """

    def __init__(self, service_name: str, exporter: SpanExporter, destination: str) -> None:
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._sender = _Sender(exporter, destination)
        self._batches = _CountedBatches(self._sender)
        provider = TracerProvider(resource=_resource(service_name), shutdown_on_exit=False)
        provider.add_span_processor(self._batches)
        self._provider = provider
        self._tracer = provider.get_tracer(_SCOPE)
        self._scope = InstrumentationScope(_SCOPE)

    def start(self, name: str, headers: Carrier) -> Span:
        """A span for a request with these headers, which begins now. The caller ends it.

        A malformed context counts as none, as W3C says: the span begins a trace of its own. If the
        request is not sampled, the span records nothing and is not sent.
        """
        return self._tracer.start_span(name, _W3C.extract(headers), SpanKind.SERVER)

    def add_child(
        self, parent: Span, name: str, start_ns: int, end_ns: int, attributes: Attributes
    ) -> None:
        """A finished span below ``parent``, which must be recording. Times are of the Unix epoch.

        It skips what a span needs while it runs, which takes 15 µs.
        """
        context = parent.get_span_context()
        ids = self._provider.id_generator
        own = SpanContext(
            context.trace_id,
            ids.generate_span_id(),
            is_remote=False,
            trace_flags=context.trace_flags,
            trace_state=context.trace_state,
        )
        child = ReadableSpan(
            name,
            own,
            context,
            self._provider.resource,
            attributes,
            instrumentation_scope=self._scope,
            start_time=start_ns,
            end_time=end_ns,
        )
        self._batches.on_end(child)

    def close(self) -> None:
        """Send what is left, for ``CLOSE_TIMEOUT_S`` at most."""
        end = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        end.start()
        end.join(CLOSE_TIMEOUT_S)
        self._sender.shutdown()
        num_ended = self._batches.count()
        if num_ended > self._sender.num_sent:
            num_lost = num_ended - self._sender.num_sent
            logger.warning("%d of %d spans were not sent", num_lost, num_ended)


class _CountedBatches(BatchSpanProcessor):
    """Counts the spans, because the queue drops the oldest ones when it is full."""

    def __init__(self, sender: _Sender) -> None:
        super().__init__(sender)
        self._ended = itertools.count()  # several threads end spans

    def on_end(self, span: ReadableSpan) -> None:
        next(self._ended)
        super().on_end(span)

    def count(self) -> int:
        """Called once, after the last span."""
        return next(self._ended)


class _Sender(SpanExporter):
    """Passes batches on, and logs when the collector stops taking them and when it does again."""

    def __init__(self, exporter: SpanExporter, destination: str) -> None:
        self.num_sent = 0
        self._exporter = exporter
        self._destination = destination
        self._is_failing = False
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by one thread at a time."""
        result = self._exporter.export(spans)
        is_sent = result is SpanExportResult.SUCCESS
        if is_sent:
            self.num_sent += len(spans)
        if is_sent == self._is_failing:
            self._is_failing = not is_sent
            what = "are sent again" if is_sent else "cannot be sent, and are dropped"
            logger.warning("traces %s: %s", what, self._destination)
        return result

    def shutdown(self) -> None:
        """Ends a try that is under way. Called by the library after the last batch, or before."""
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()


def headers_of(span: Span) -> dict[str, str]:
    """The headers that make a request to another process part of this span's trace."""
    headers: dict[str, str] = {}
    _W3C.inject(headers, set_span_in_context(span))
    return headers


def _resource(service_name: str) -> Resource:
    found = Resource.create()
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return found.merge(Resource({SERVICE_NAME: service_name}))
    return found
