"""A collector of traces: it takes OTLP over HTTP, as OpenTelemetry's own does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from waiting import POLL_S, wait_for


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has no parent."""
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool


@dataclass
class TraceReceiver:
    url: str
    """For ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
    spans: list[ReceivedSpan] = field(default_factory=list)
    num_requests: int = 0

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def wait_for(self, trace_id: str, *names: str) -> list[ReceivedSpan]:
        """The spans of the trace, once it has spans of all these names, or more."""
        wait_for(lambda: Counter(names) <= Counter(span.name for span in self.trace(trace_id)))
        return self.trace(trace_id)


@contextmanager
def trace_receiver() -> Iterator[TraceReceiver]:
    counting = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            with counting:
                receiver.num_requests += 1
                receiver.spans += _read(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = TraceReceiver(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _read(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                service,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.name,
                span.kind,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _attributes(span.attributes),
                span.status.code == span.status.STATUS_CODE_ERROR,
            )


def _attributes(items: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in items}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
