"""Traces through a real server and gateway, to a collector that is the test's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import ModelLoadError
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient
from running_gateway import RunningGateway, running_gateway
from running_server import job_held, rank_stopped, running_server
from serving_client import (
    ANSWER_TIMEOUT_S,
    GENERATE,
    GrpcStream,
    generate,
    post,
    unfinished_jobs,
    wait_until_idle,
)
from trace_receiver import ReceivedSpan, TraceReceiver, trace_receiver
from waiting import wait_for

CLIENT_SPAN = "00f067aa0ba902b7"
PHASES = ("queue", "prefill", "decode")
JOB = ("job", *PHASES)
SERVER = 2  # the kind of a span
REQUEST = {"text_input": "hello", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Traced:
    receiver: TraceReceiver
    server: TritonServer
    gateway: RunningGateway

    @property
    def endpoints(self) -> Endpoints:
        return self.server.endpoints

    def wait_for_job(self, trace_id: str) -> ReceivedSpan:
        """The job's span, whose phases are its children and follow each other."""
        spans = self.receiver.wait_for(trace_id, *JOB)
        (job,) = named(spans, "job")
        check_phases(job, spans)
        return job


@pytest.fixture(scope="module")
def traced(tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """The tiny model with little memory for KV, and a gateway."""
    config = tiny_config.with_keys(device_blocks=60)
    directory = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch, trace_receiver() as receiver:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with running_server(config, directory / "server.log") as server:
            url = f"grpc://{server.endpoints.grpc_url}"
            with running_gateway(url, directory / "gateway.log") as gateway:
                yield Traced(receiver, server, gateway)


def new_trace() -> tuple[str, str]:
    """A client's trace, and its header ``traceparent``."""
    trace_id = f"{random.getrandbits(128):032x}"
    return trace_id, f"00-{trace_id}-{CLIENT_SPAN}-01"


def named(spans: list[ReceivedSpan], *names: str) -> list[ReceivedSpan]:
    found = [span for span in spans if span.name in names]
    return sorted(found, key=lambda span: (names.index(span.name), span.start_ns))


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def check_phases(job: ReceivedSpan, spans: list[ReceivedSpan]) -> None:
    queue, prefill, decode = named(children(spans, job), *PHASES)
    edges = [job.start_ns, queue.start_ns, queue.end_ns, prefill.start_ns, prefill.end_ns]
    edges += [decode.start_ns, decode.end_ns, job.end_ns]
    assert edges == sorted(edges)
    assert (queue.end_ns, prefill.end_ns) == (prefill.start_ns, decode.start_ns)


def test_a_request_through_the_gateway_is_one_trace(traced: Traced) -> None:
    trace_id, header = new_trace()
    with traced.gateway.client() as client:
        chunks = list(
            client.completions.create(
                model="fastserve",
                prompt="hello",
                max_tokens=4,
                n=2,
                stream=True,
                extra_body={"ignore_eos": True},
                extra_headers={"traceparent": header, "tracestate": "vendor=1"},
            )
        )
    spans = traced.receiver.wait_for(trace_id, "POST /v1/completions", *JOB, *JOB)
    (request,) = named(spans, "POST /v1/completions")
    assert (request.service, request.kind, request.parent_id) == (
        "fastserve-gateway",
        SERVER,
        CLIENT_SPAN,
    )
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "fastserve",
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 8,
    }
    jobs = children(spans, request)
    assert len(jobs) == 2
    for number, job in enumerate(sorted(jobs, key=lambda job: job.attributes["fastserve.job.id"])):
        assert (job.service, job.kind, job.name) == ("fastserve", SERVER, "job")
        assert job.attributes["fastserve.job.id"] == f"{chunks[0].id}-{number}"
        assert job.attributes["gen_ai.usage.output_tokens"] == 4
        assert job.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert request.start_ns < job.start_ns < job.end_ns < request.end_ns + 10**9
        check_phases(job, spans)
    assert "hello" not in str(spans)


def test_a_client_that_goes_away_shows_in_both_spans(traced: Traced) -> None:
    body = {"model": "fastserve", "prompt": "hello", "max_tokens": 900, "stream": True}
    body["ignore_eos"] = True
    url = f"{traced.gateway.api_url}/completions"
    wait_until_idle(traced.endpoints)
    with ExitStack() as stack:

        def start() -> tuple[str, httpx2.Response]:
            trace_id, header = new_trace()
            headers = {"traceparent": header}
            answer = stack.enter_context(
                httpx2.stream("POST", url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S)
            )
            next(answer.iter_lines())
            return trace_id, answer

        with job_held(traced.server, start) as (trace_id, answer):
            answer.close()
            traced.receiver.wait_for(trace_id, "POST /v1/completions")
    spans = traced.receiver.wait_for(trace_id, "POST /v1/completions", *JOB)
    request, job = named(spans, "POST /v1/completions", "job")
    assert request.attributes["http.response.status_code"] == 499
    assert job.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert not request.is_error
    assert not job.is_error


def test_a_header_of_a_grpc_call_makes_its_jobs_part_of_the_trace(traced: Traced) -> None:
    trace_id, header = new_trace()
    headers = {"traceparent": header, "tracestate": "vendor=1"}
    answer = generate(traced.endpoints.grpc_url, headers=headers, stream=True, **REQUEST)
    assert len(answer.token_ids) == 4
    job = traced.wait_for_job(trace_id)
    assert (job.parent_id, job.kind) == (CLIENT_SPAN, SERVER)


def test_a_request_parameter_does_so_over_http(traced: Traced) -> None:
    trace_id, header = new_trace()
    answer = post(traced.endpoints.http_url, GENERATE, {**REQUEST, "traceparent": header})
    assert answer.status_code == 200, answer.text
    assert traced.wait_for_job(trace_id).parent_id == CLIENT_SPAN


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_python_client_passes_a_context_on(traced: Traced, scheme: str) -> None:
    trace_id, header = new_trace()
    context = {"traceparent": header, "tracestate": "vendor=1", "baggage": "x=1"}
    address = traced.endpoints.grpc_url
    url = traced.endpoints.http_url if scheme == "http" else f"grpc://{address}"
    with FastServeClient(url) as client:
        client.generate("hello", max_tokens=4, ignore_eos=True, trace_context=context)
    assert traced.wait_for_job(trace_id).parent_id == CLIENT_SPAN


@pytest.mark.parametrize("value", ["x", 'a "quoted\\ one', "00-0-0-01"])
def test_a_malformed_context_is_no_error(traced: Traced, value: str) -> None:
    headers = {"traceparent": value, "tracestate": value}
    answer = generate(
        traced.endpoints.grpc_url, headers=headers, request_id=value, stream=True, **REQUEST
    )
    assert len(answer.token_ids) == 4
    body = {**REQUEST, "traceparent": value, "tracestate": 5}
    assert post(traced.endpoints.http_url, GENERATE, body).status_code == 200
    with FastServeClient(f"grpc://{traced.endpoints.grpc_url}") as client:
        assert client.generate("a", max_tokens=1, trace_context={"traceparent": value + "é\n"})


def test_requests_that_are_no_jobs_take_a_context_too(traced: Traced) -> None:
    _, header = new_trace()
    body = {"task": "describe", "traceparent": header, "tracestate": "vendor=1"}
    assert "task_result" in post(traced.endpoints.http_url, GENERATE, body).json()


def test_preemptions_and_swaps_are_spans(traced: Traced) -> None:
    rng = random.Random(4)
    # Each stream needs 25 blocks in the end; the device has 60.
    prompts = [[rng.randrange(3, 1024) for _ in range(200)] for _ in range(12)]
    traces = [new_trace() for _ in prompts]
    wait_until_idle(traced.endpoints)
    with rank_stopped(traced.server.runtime):  # until all have arrived
        streams = [
            GrpcStream(
                traced.endpoints.grpc_url,
                headers={"traceparent": header},
                input_ids=ids,
                stream=True,
                max_tokens=200,
                ignore_eos=True,
                return_perf_metrics=True,
            )
            for ids, (_, header) in zip(prompts, traces, strict=True)
        ]
        wait_for(lambda: unfinished_jobs(traced.endpoints.metrics_url) == len(streams))
    answers = [stream.finish() for stream in streams]
    num_copies = 0
    for answer, (trace_id, _) in zip(answers, traces, strict=True):
        job = traced.wait_for_job(trace_id)
        spans = children(traced.receiver.trace(trace_id), job)
        assert answer.outputs["num_preemptions"] == len(named(spans, "preemption"))
        copies = named(spans, "swap_out", "swap_in")
        for span in (*named(spans, "preemption"), *copies):
            assert job.start_ns <= span.start_ns <= span.end_ns <= job.end_ns
        for span in copies:
            assert 0 < span.attributes["fastserve.kv_blocks"] <= 25
        num_copies += len(copies)
    assert sum(answer.outputs["num_preemptions"] for answer in answers) > 0
    assert num_copies > 0


def test_a_server_that_cannot_send_them_says_so_at_the_start(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")
    with (
        pytest.raises(ModelLoadError, match="ENDPOINT: got 'collector:4317'; must"),
        running_server(tiny_config, tmp_path / "server.log"),
    ):
        pass
    assert "Traceback" not in (tmp_path / "server.log").read_text(encoding="utf-8")
