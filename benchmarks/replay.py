"""Runs a trace of jobs on the real engine."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fastserve_backend.engine.engine import Engine
from fastserve_backend.errors import EngineError
from fastserve_backend.job import (
    DEFAULT_SERVICE,
    FinishReason,
    JobOutput,
    JobStats,
    ServiceLevel,
)
from fastserve_backend.sampling_params import SamplingParams
from fastserve_bench.report.records import JobRecord
from fastserve_bench.workload import TraceJob

DEADLINE_S = 600.0
_CHECK_S = 0.1


class TooSlow(Exception):
    """The jobs did not end in time."""


def on_the_engine(
    engine: Engine, trace: list[TraceJob], *, deadline_s: float = DEADLINE_S
) -> list[JobRecord]:
    """Submits each job at its time; returns the engine's record of each.

    Latencies count from the arrival in the trace, not from the submission. Otherwise they would be
    too short where this process lags.

    Raises:
        TooSlow: after ``deadline_s``. The jobs are cancelled.
    """
    rng = random.Random(1)
    last_id = min(50000, engine.model_config.vocab_size)
    jobs = [
        (
            [rng.randrange(300, last_id) for _ in range(job.prompt_tokens)],
            SamplingParams(max_tokens=job.output_tokens, temperature=0, ignore_eos=True),
        )
        for job in trace
    ]
    answers = run_jobs(engine, jobs, deadline_s, [job.arrival_s for job in trace])
    return [_record(answer) for answer in answers]


def _record(answer: Answer) -> JobRecord:
    """Record of a job that has ended."""
    stats = answer.stats
    assert stats.first_token_s is not None
    assert stats.last_token_s is not None
    return JobRecord(
        arrival_s=answer.arrival_s,
        first_scheduled_s=stats.first_scheduled_s,
        first_token_s=stats.first_token_s,
        last_token_s=stats.last_token_s,
        prompt_tokens=stats.num_input_tokens,
        output_tokens=stats.num_output_tokens,
        num_preemptions=stats.num_preemptions,
        swap_stall_s=stats.swap_stall_s,
    )


@dataclass
class Answer:
    """The engine's answer to one job."""

    arrival_s: float
    """When the job was due, on the engine's clock."""
    token_ids: list[int] = field(default_factory=list)
    end: JobOutput | None = None
    """The job's last output."""

    @property
    def stats(self) -> JobStats:
        """Statistics; only for a job that has ended."""
        assert self.end is not None
        assert self.end.stats is not None
        return self.end.stats


def run_jobs(
    engine: Engine,
    jobs: Sequence[tuple[Sequence[int], SamplingParams]],
    deadline_s: float = DEADLINE_S,
    arrivals_s: Sequence[float] | None = None,
    service: ServiceLevel = DEFAULT_SERVICE,
) -> list[Answer]:
    """Submits each job, at its time if there are times, and waits for all.

    Args:
        arrivals_s: ascending.
        service: of all jobs.

    Raises:
        TooSlow: after ``deadline_s``. The jobs are cancelled.
        EngineError: a job failed.
    """
    started_s = engine.clock.now()
    arrivals_s = arrivals_s or [0.0] * len(jobs)
    answers = [Answer(started_s + arrival_s) for arrival_s in arrivals_s]
    numbers: list[int] = []
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: set[int] = set()

    def sink_of(index: int) -> Callable[[JobOutput], None]:
        def sink(output: JobOutput) -> None:
            answers[index].token_ids.extend(output.token_ids)
            if output.finish_reason is not None:
                answers[index].end = output
                ends.put(index)

        return sink

    try:
        while len(ended) < len(jobs):
            elapsed_s = engine.clock.now() - started_s
            if elapsed_s > deadline_s:
                raise TooSlow(f"{len(jobs) - len(ended)} jobs had not ended in {deadline_s:.0f} s")
            wait_s = _CHECK_S
            while len(numbers) < len(jobs):
                index = len(numbers)
                if arrivals_s[index] > elapsed_s:
                    wait_s = min(wait_s, arrivals_s[index] - elapsed_s)
                    break
                sink = sink_of(index)
                numbers.append(engine.submit(str(index), *jobs[index], sink, service=service))
            with suppress(queue.Empty):  # until the next arrival or the next look
                index = ends.get(timeout=wait_s)
                end = answers[index].end
                if end is not None and end.finish_reason is FinishReason.ERROR:
                    raise EngineError(end.error or "a job failed")
                ended.add(index)
    finally:
        for index, number in enumerate(numbers):
            if index not in ended:
                engine.cancel(number)
    return answers
