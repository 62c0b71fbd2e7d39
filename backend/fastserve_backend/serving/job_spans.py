"""The spans of a traced job. They are made when it has ended, from the times that it noted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fastserve_backend.job import FinishReason, JobOutput, JobStats, ServiceLevel
from fastserve_backend.job_trace import JobTrace
from fastserve_backend.serving.responses import WallClock
from fastserve_backend.system.clock import Clock

if TYPE_CHECKING:
    from fastserve_client.tracer import Tracer
    from opentelemetry.trace import Span


class _Phase(NamedTuple):
    """In seconds of the engine's clock."""

    name: str
    start_s: float
    end_s: float


class JobSpans:
    """The span ``job`` of one request, from its arrival to its last response, and those below it.

    Args:
        job: of ``tracer``. It must be recording.
    """

    def __init__(self, tracer: Tracer, job: Span, clock: Clock) -> None:
        self.trace = JobTrace()
        """For the engine."""
        self._tracer = tracer
        self._job = job
        self._clock = clock

    def describe(self, job_id: str, service: ServiceLevel, model: str, policy: str) -> None:
        """What is known before the job runs."""
        self._job.set_attributes(
            {
                "gen_ai.request.model": model,
                "fastserve.job.id": job_id,
                "fastserve.policy": policy,
                "fastserve.priority": service.priority,
            }
        )
        if service.tenant:
            self._job.set_attribute("fastserve.tenant", service.tenant)

    def on_refused(self, error: Exception) -> None:
        """There is no job. The error's text may quote the request, so only its type is kept."""
        self._fail(type(error).__name__)
        self._job.end()

    def on_end(self, last: JobOutput) -> None:
        """The client has the job's last output."""
        stats, reason = last.stats, last.finish_reason
        assert stats is not None
        assert reason is not None
        now = self._clock.now()
        self.trace.on_running(now)  # it may have been cancelled while it was set aside
        # Measured anew: other machines' spans go by the system's time as it is now.
        nanoseconds = WallClock(self._clock).nanoseconds
        for phase in _phases(stats, now):
            start_ns, end_ns = nanoseconds(phase.start_s), nanoseconds(phase.end_s)
            self._tracer.add_child(self._job, phase.name, start_ns, end_ns, {})
        for name, start_s, end_s, num_blocks in self.trace.periods:
            attributes = {"fastserve.kv_blocks": num_blocks} if num_blocks else {}
            start_ns, end_ns = nanoseconds(start_s), nanoseconds(end_s)
            self._tracer.add_child(self._job, name, start_ns, end_ns, attributes)
        self._job.set_attributes(
            {
                "gen_ai.usage.input_tokens": stats.num_input_tokens,
                "gen_ai.usage.output_tokens": stats.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
                "gen_ai.response.finish_reasons": (reason.value,),
                "fastserve.queue_level": stats.queue_level,
                "fastserve.num_preemptions": stats.num_preemptions,
                "fastserve.num_swaps": stats.num_swaps,
                "fastserve.swap_stall_s": stats.swap_stall_s,
            }
        )
        if self.trace.num_left_out:
            self._job.set_attribute("fastserve.num_spans_left_out", self.trace.num_left_out)
        if last.refusal is not None:
            self._fail(type(last.refusal).__name__)
        elif reason is FinishReason.ERROR:
            self._fail("EngineError")
        self._job.end(nanoseconds(now))

    def _fail(self, error_type: str) -> None:
        from opentelemetry.trace import StatusCode

        self._job.set_status(StatusCode.ERROR)
        self._job.set_attribute("error.type", error_type)


def _phases(stats: JobStats, now: float) -> Iterator[_Phase]:
    """Those that the job has reached; the last one may be unfinished."""
    scheduled_s, first_s, last_s = stats.first_scheduled_s, stats.first_token_s, stats.last_token_s
    yield _Phase("queue", stats.arrival_s, now if scheduled_s is None else scheduled_s)
    if scheduled_s is not None:
        yield _Phase("prefill", scheduled_s, now if first_s is None else first_s)
    if first_s is not None and last_s is not None and last_s > first_s:
        yield _Phase("decode", first_s, last_s)
