"""The spans of a job, from the times that the engine noted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fastserve_backend.errors import InvalidRequestError, OverloadedError
from fastserve_backend.job import FinishReason, JobOutput, JobStats, ServiceLevel
from fastserve_backend.job_trace import MAX_PERIODS
from fastserve_backend.serving.job_spans import JobSpans
from fastserve_backend.system.clock import VirtualClock
from fastserve_client.tracer import Tracer
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

END_S = 20.0


class TracedJob:
    """A job that arrives at 0 s and ends at 20 s."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = Tracer("fastserve", self.exporter, "memory")
        self.clock = VirtualClock()
        self.root = self.tracer.start("job", {})
        self.spans = JobSpans(self.tracer, self.root, self.clock)

    def end(
        self,
        *,
        scheduled_s: float | None = 2.0,
        first_s: float | None = 5.0,
        last_s: float | None = 19.0,
        reason: FinishReason = FinishReason.LENGTH,
        refusal: InvalidRequestError | None = None,
    ) -> dict[str, list[tuple[float, float]]]:
        """The times of the spans below the job's, by name, in seconds since its arrival."""
        stats = JobStats(0.0, scheduled_s, first_s, last_s, 1, 2, 0.5, 3, 7, 4, 9, 0.0)
        self.clock.advance_to(END_S)
        now_ns = time.time_ns()
        arrival_ns = now_ns - int(END_S * 1e9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: now_ns)
            self.spans.on_end(JobOutput("", (), (), reason, refusal=refusal, stats=stats))
        times: dict[str, list[tuple[float, float]]] = {}
        for span in self.sent():
            if span.name != "job":
                assert span.parent == self.root.get_span_context()
                assert span.start_time is not None
                assert span.end_time is not None
                edges = (span.start_time - arrival_ns) / 1e9, (span.end_time - arrival_ns) / 1e9
                times.setdefault(span.name, []).append((round(edges[0]), round(edges[1])))
        return times

    def sent(self) -> list[ReadableSpan]:
        self.tracer.close()
        return list(self.exporter.get_finished_spans())

    def job(self) -> ReadableSpan:
        return next(span for span in self.exporter.get_finished_spans() if span.name == "job")


@pytest.fixture
def traced() -> Iterator[TracedJob]:
    job = TracedJob()
    yield job
    job.tracer.close()


def test_a_job_has_phases_and_what_happened_meanwhile(traced: TracedJob) -> None:
    traced.spans.describe("id-1", ServiceLevel(priority=2, tenant="a"), "llama", "gittins")
    trace = traced.spans.trace
    trace.on_running(5.0)  # it was not set aside
    trace.on_preempted(6.0)
    trace.add("swap_out", 6.0, 7.0, num_blocks=11)
    trace.add("swap_in", 8.0, 9.0, num_blocks=12)
    trace.on_running(10.0)
    trace.on_running(11.0)
    assert traced.end() == {
        "queue": [(0, 2)],
        "prefill": [(2, 5)],
        "decode": [(5, 19)],
        "preemption": [(6, 10)],
        "swap_out": [(6, 7)],
        "swap_in": [(8, 9)],
    }
    assert dict(traced.job().attributes or {}) == {
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.finish_reasons": ("length",),
        "fastserve.job.id": "id-1",
        "fastserve.policy": "gittins",
        "fastserve.priority": 2,
        "fastserve.tenant": "a",
        "fastserve.queue_level": 3,
        "fastserve.num_preemptions": 1,
        "fastserve.num_swaps": 2,
        "fastserve.swap_stall_s": 0.5,
    }
    assert traced.job().status.is_unset


@pytest.mark.parametrize(
    ("scheduled_s", "first_s", "last_phase"),
    [(None, None, ("queue", (0, 20))), (2.0, None, ("prefill", (2, 20)))],
)
def test_the_phase_that_a_cancelled_job_is_in_ends_with_it(
    traced: TracedJob,
    scheduled_s: float | None,
    first_s: float | None,
    last_phase: tuple[str, tuple[int, int]],
) -> None:
    times = traced.end(
        scheduled_s=scheduled_s, first_s=first_s, last_s=first_s, reason=FinishReason.CANCELLED
    )
    name, edges = last_phase
    assert times[name] == [edges]
    assert "decode" not in times
    assert traced.job().status.is_unset  # the client wanted it


def test_a_job_that_was_cancelled_while_it_was_set_aside(traced: TracedJob) -> None:
    traced.spans.trace.on_preempted(6.0)
    assert traced.end(last_s=6.0, reason=FinishReason.CANCELLED)["preemption"] == [(6, 20)]


def test_spans_of_a_job_are_bounded(traced: TracedJob) -> None:
    for _ in range(10_000):
        traced.spans.trace.on_preempted(6.0)
        traced.spans.trace.on_running(7.0)
    assert len(traced.end()["preemption"]) == MAX_PERIODS
    attributes = traced.job().attributes or {}
    assert attributes["fastserve.num_spans_left_out"] == 10_000 - MAX_PERIODS


@pytest.mark.parametrize(
    ("refusal", "reason", "error_type"),
    [
        (None, FinishReason.ERROR, "EngineError"),
        (InvalidRequestError("f", "secret", "x"), FinishReason.ERROR, "InvalidRequestError"),
    ],
)
def test_a_failed_job_is_an_error_without_its_text(
    traced: TracedJob, refusal: InvalidRequestError | None, reason: FinishReason, error_type: str
) -> None:
    traced.end(reason=reason, refusal=refusal)
    assert not traced.job().status.is_ok
    assert not traced.job().status.is_unset
    assert (traced.job().attributes or {})["error.type"] == error_type
    assert "secret" not in traced.job().to_json()


def test_a_refused_request_has_a_span_alone(traced: TracedJob) -> None:
    traced.spans.on_refused(OverloadedError("secret"))
    (span,) = traced.sent()
    assert (span.attributes or {})["error.type"] == "OverloadedError"
    assert "secret" not in span.to_json()
