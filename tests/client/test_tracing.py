"""Which traces are sent, and what becomes of them where nobody takes them."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from fastserve_client import tracer as tracer_module
from fastserve_client.tracer import CLOSE_TIMEOUT_S, Tracer, headers_of
from fastserve_client.tracing import TracesError, open_tracer
from fresh_interpreter import loaded_modules
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trace_receiver import TraceReceiver, trace_receiver
from waiting import DEADLINE_S, wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer's end waits for its threads, however busy the machine is."""
    monkeypatch.setattr(tracer_module, "CLOSE_TIMEOUT_S", 60.0)


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    with trace_receiver() as receiver:
        yield receiver


def memory_tracer() -> tuple[Tracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Tracer("fastserve", exporter, "memory"), exporter


# --- The environment --------------------------------------------------------------------------


@pytest.mark.slow
def test_without_an_endpoint_nothing_is_imported() -> None:
    program = "from fastserve_client.tracing import open_tracer; assert open_tracer('a') is None"
    modules = "fastserve_backend.serving.job_spans, fastserve_backend.engine.engine"
    assert "opentelemetry" not in loaded_modules(f"{program}; import {modules}")
    # FastAPI imports OpenTelemetry's interface, but neither it nor the gateway the rest.
    unused = "fastserve_client.tracer", "opentelemetry.sdk", "opentelemetry.exporter"
    program = f"import fastserve_gateway.command, sys; assert not sys.modules.keys() & {unused}"
    loaded_modules(program)


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]
)
def test_the_environment_can_disable_traces(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    assert open_tracer("fastserve") is None


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        (ENDPOINT, "collector:4317", "must begin with http"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf only"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc", "http/protobuf only"),
    ],
)
def test_what_cannot_be_sent_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    with pytest.raises(TracesError, match=f"{variable}: got '{value}'; .*{problem}"):
        open_tracer("fastserve")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (ENDPOINT, "ftp://user:s3cret@collector"),
        (ENDPOINT, "http://user:s3cret@"),
        (ENDPOINT, "http://user:s3cret@collector:99999"),
        (ENDPOINT, "user:s3cret@collector"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "Bearer s3cret"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", 'a=b, key="s3cret"'),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),  # less than a batch has
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
    ],
)
def test_a_wrong_variable_is_an_error_that_has_no_keys(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    with pytest.raises(TracesError) as raised:
        open_tracer("fastserve")
    assert "s3cret" not in str(raised.value) + caplog.text


@pytest.mark.parametrize("protocol", ["", "http/protobuf"])
def test_the_log_has_the_endpoint_without_its_keys(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://user:s3cret@127.0.0.1:9/traces?key=s3cret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer s3cret,a=b%20c")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    tracer = open_tracer("fastserve")
    assert tracer is not None
    tracer.start("job", {}).end()
    wait_for(lambda: any("cannot be sent" in text for text in caplog.messages))
    tracer.close()
    assert "http://***@127.0.0.1:9/traces?***" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_missing_package_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracesError, match=rf"{ENDPOINT} is set, but .*\.\[traces\]"):
        open_tracer("fastserve")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ["fastserve", "chosen"])
def test_the_environment_names_endpoint_and_service(
    monkeypatch: pytest.MonkeyPatch, receiver: TraceReceiver, name: str
) -> None:
    monkeypatch.setenv(ENDPOINT, receiver.url)
    if name == "chosen":
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    tracer = open_tracer("fastserve")
    assert tracer is not None
    tracer.start("job", {}).end()
    tracer.close()  # sends what is left
    (span,) = receiver.spans
    assert (span.service, span.name, span.parent_id) == (name, "job", "")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("share", "num_sampled"), [("0", 0), ("1", 20)])
def test_the_environment_chooses_the_sampled_share(
    monkeypatch: pytest.MonkeyPatch, share: str, num_sampled: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    tracer, exporter = memory_tracer()
    for _ in range(20):
        tracer.start("job", {}).end()
    tracer.start("sampled by its client", {"traceparent": f"00-{TRACE}-{PARENT}-01"}).end()
    tracer.close()
    assert len(exporter.get_finished_spans()) == num_sampled + 1


# --- Context ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_a_request_is_part_of_its_clients_trace() -> None:
    tracer, exporter = memory_tracer()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1,b=2", "baggage": "c=3"}
    span = tracer.start("job", headers)
    passed_on = headers_of(span)
    assert passed_on["traceparent"].startswith(f"00-{TRACE}-")
    assert PARENT not in passed_on["traceparent"]
    assert passed_on["tracestate"] == "a=1,b=2"
    tracer.add_child(span, "queue", 1, 2, {"a": 1})
    span.end()
    tracer.close()
    child, job = exporter.get_finished_spans()
    assert job.parent is not None
    assert f"{job.parent.span_id:016x}" == PARENT
    assert child.parent == job.context
    assert (child.start_time, child.end_time) == (1, 2)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "traceparent",
    ["", "x", f"00-{TRACE}-{PARENT}", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01",
     f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01" + "-" * 10_000],
)  # fmt: skip
def test_a_malformed_context_counts_as_none(
    traceparent: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracer, exporter = memory_tracer()
    tracer.start("job", {"traceparent": traceparent, "tracestate": "=" * 1000}).end()
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert caplog.messages == []  # clients cannot fill the log


def test_what_a_client_does_not_sample_is_not_sent_and_passed_on_so() -> None:
    tracer, exporter = memory_tracer()
    span = tracer.start("job", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert not span.is_recording()
    assert headers_of(span)["traceparent"].endswith("-00")
    span.end()
    tracer.close()
    assert exporter.get_finished_spans() == ()


# --- Collectors that do not take them ---------------------------------------------------------


class FailingExporter(SpanExporter):
    """Fails while it is told to."""

    def __init__(self) -> None:
        self.fails = True
        self.num_calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self.fails else SpanExportResult.SUCCESS
        self.num_calls += 1  # last: the test then changes ``fails``
        return result

    def shutdown(self) -> None:
        pass


@pytest.mark.usefixtures("patient")
def test_lost_spans_are_logged_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    exporter = FailingExporter()
    tracer = Tracer("fastserve", exporter, "http://collector")
    for num_calls in (1, 2, 3):
        tracer.start("job", {}).end()
        wait_for(lambda num_calls=num_calls: exporter.num_calls == num_calls)
    exporter.fails = False
    tracer.start("job", {}).end()
    wait_for(lambda: exporter.num_calls == 4)
    tracer.close()
    assert caplog.messages == [
        "traces cannot be sent, and are dropped: http://collector",
        "traces are sent again: http://collector",
        "3 of 4 spans were not sent",
    ]


@pytest.mark.usefixtures("patient")
def test_a_full_queue_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # only a full batch is sent
    entered, release = threading.Event(), threading.Event()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            entered.set()
            assert release.wait(DEADLINE_S)
            return super().export(spans)

    exporter = Stuck()
    tracer = Tracer("fastserve", exporter, "memory")
    for _ in range(10):
        tracer.start("job", {}).end()
    assert entered.wait(DEADLINE_S)
    for _ in range(1000):
        tracer.start("job", {}).end()
    release.set()
    tracer.close()
    assert len(exporter.get_finished_spans()) == 20
    assert caplog.messages == ["990 of 1010 spans were not sent"]


@pytest.mark.slow
@pytest.mark.parametrize("is_listening", [False, True])
def test_a_collector_that_does_not_answer_delays_the_end_by_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_listening: bool
) -> None:
    # The exporter's own limit, far above that of the end.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if is_listening:
            silent.listen()
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracer = open_tracer("fastserve")
        assert tracer is not None
        tracer.start("job", {}).end()
        began_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - began_s < CLOSE_TIMEOUT_S + DEADLINE_S  # for a busy machine
    lost = [record for record in caplog.records if "1 of 1 spans" in record.getMessage()]
    assert [record.levelno for record in lost] == [logging.WARNING]
