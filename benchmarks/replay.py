"""A small trace for this machine, and how it goes on the real engine."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from fastserve_backend import LLM, SamplingParams
from fastserve_backend.job import JobOutput
from fastserve_client.report import JobRecord
from fastserve_client.workload import TraceJob, poisson_trace

MODEL, DTYPE = "opt-125m", "bfloat16"
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens, at least 1."""

    mu: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(self.most, round(rng.lognormvariate(self.mu, self.sigma)) + 1)


def workload(
    rate: float, num_jobs: int, seed: int, prompts: Lengths, outputs: Lengths
) -> list[TraceJob]:
    rng = random.Random(seed)
    lengths = [(prompts.draw(rng), outputs.draw(rng)) for _ in range(1000)]
    return poisson_trace(lengths, rate, num_jobs, seed)


def on_the_engine(llm: LLM, trace: list[TraceJob]) -> list[JobRecord]:
    """Submits each job at its time; what the engine says of each job."""
    rng = random.Random(1)
    ended = threading.Semaphore(0)
    stats = {}

    def sink_of(number: int):  # type: ignore[no-untyped-def]
        def sink(output: JobOutput) -> None:
            if output.stats is not None:
                stats[number] = output.stats
                ended.release()

        return sink

    started_s = time.monotonic()
    for number, job in enumerate(trace):
        wait_s = started_s + job.arrival_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        params = SamplingParams(max_tokens=job.output_tokens, temperature=0, ignore_eos=True)
        prompt = [rng.randrange(300, 50000) for _ in range(job.prompt_tokens)]
        llm.engine.submit(str(number), prompt, params, sink_of(number))
    for _ in trace:
        assert ended.acquire(timeout=DEADLINE_S)
    return [
        JobRecord(
            arrival_s=one.arrival_s,
            first_scheduled_s=one.first_scheduled_s,
            first_token_s=one.first_token_s,
            last_token_s=one.last_token_s,
            prompt_tokens=one.num_input_tokens,
            output_tokens=one.num_output_tokens,
            num_preemptions=one.num_preemptions,
            executed_s=0.0,
            swap_stall_s=one.swap_stall_s,
            alone_s=None,
        )
        for one in (stats[number] for number in range(len(trace)))
    ]
