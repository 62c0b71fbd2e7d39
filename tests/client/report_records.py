"""Records for the tests of reports."""

from __future__ import annotations

from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.summary import summarize
from fastserve_bench.report.sweep import SweepPoint


def record(
    arrival_s: float = 0.0,
    ttft_s: float = 1.0,
    latency_s: float = 4.0,
    output_tokens: int = 4,
    executed_s: float = 2.0,
    num_preemptions: int = 0,
    alone_s: float | None = None,
) -> JobRecord:
    return JobRecord(
        arrival_s=arrival_s,
        first_scheduled_s=arrival_s + ttft_s / 2,
        first_token_s=arrival_s + ttft_s,
        last_token_s=arrival_s + latency_s,
        prompt_tokens=10,
        output_tokens=output_tokens,
        num_preemptions=num_preemptions,
        executed_s=executed_s,
        alone_s=alone_s,
    )


def sweep() -> list[SweepPoint]:
    """Two policies at two rates. One of them reports no TPOT, but its latency alone."""
    return [
        SweepPoint("fcfs", 2.0, summarize([record(latency_s=8.0, num_preemptions=1)])),
        SweepPoint("fcfs", 1.0, summarize([record()])),
        SweepPoint("srpt", 1.0, summarize([record(ttft_s=4.0, output_tokens=1, alone_s=2.0)])),
        SweepPoint("srpt", 2.5, summarize([record(latency_s=5.0, executed_s=0.0)])),
    ]
