"""The gateway's spans of requests that no server answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastserve_client.tracer import Tracer
from fastserve_gateway.app import create_app
from fastserve_gateway.request_traces import RequestTraces, note_move
from lone_gateway import settings
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from waiting import DEADLINE_S

SECRET = "the prompt that nobody may read"
PARENT = {"traceparent": f"00-{7:032x}-{9:016x}-01"}


class TracedGateway:
    """A gateway without a server."""

    def __init__(self, client: TestClient, tracer: Tracer, exporter: InMemorySpanExporter) -> None:
        self.client = client
        self._tracer = tracer
        self._exporter = exporter

    def spans(self) -> list[ReadableSpan]:
        """Called once, at the end."""
        self._tracer.close()
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracedGateway]:
    monkeypatch.setattr("fastserve_client.tracer.CLOSE_TIMEOUT_S", DEADLINE_S)
    exporter = InMemorySpanExporter()
    tracer = Tracer("fastserve-gateway", exporter, "memory")
    app = create_app(settings(), tracer)
    with TestClient(app, base_url="http://127.0.0.1:9000") as client:
        yield TracedGateway(client, tracer, exporter)


def test_only_requests_for_work_have_spans(traced: TracedGateway) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/live"):
        traced.client.get(path, headers=PARENT)
    assert traced.spans() == []


@pytest.mark.parametrize(
    ("path", "route", "body", "status"),
    [
        ("/v1/completions", "/v1/completions", {"model": "fastserve", "prompt": SECRET}, 503),
        ("/v1/completions", "/v1/completions", {"model": SECRET, "prompt": SECRET}, 404),
        ("/v1/chat/completions", "/v1/chat/completions", {"messages": SECRET}, 400),
        (f"/v1/{SECRET}", "", {}, 404),
    ],
)
def test_a_refused_request_has_a_span_without_its_words(
    traced: TracedGateway, path: str, route: str, body: dict[str, str], status: int
) -> None:
    assert traced.client.post(path, json=body, headers=PARENT).status_code == status
    (span,) = traced.spans()
    assert span.name == f"POST {route}".rstrip()
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (7, 9)
    attributes = span.attributes or {}
    assert (attributes["http.route"], attributes["http.response.status_code"]) == (route, status)
    assert attributes.get("error.type") == (str(status) if status >= 500 else None)
    assert span.status.is_unset is (status < 500)
    assert SECRET not in span.to_json()


def test_an_answer_that_moves_is_an_event_of_its_request() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        note_move()
        await PlainTextResponse("moved")(scope, receive, send)

    exporter = InMemorySpanExporter()
    tracer = Tracer("fastserve-gateway", exporter, "memory")
    client = TestClient(RequestTraces(answer, tracer))
    assert client.post("/v1/completions").text == "moved"
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert [event.name for event in span.events] == ["answer moved", "response started"]
