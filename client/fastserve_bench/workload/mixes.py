"""Workloads that are more than independent jobs: agents' conversations, a batch beside a chat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastserve_bench.workload.arrivals import arrival_times
from fastserve_bench.workload.service_class import ServiceClass
from fastserve_bench.workload.synthetic import synthetic_lengths
from fastserve_bench.workload.trace import TraceJob, merged, poisson_trace

MIXES = ("agents", "batch-beside-chat")

# An agent's conversation: instructions and tools, then turns that end with a tool call. Each turn's
# prompt is the whole conversation before it, with the answer and the tool's result.
_FIRST_PROMPT = 1500
_MEAN_TURNS = 6
_MEAN_ANSWER, _MEAN_RESULT = 120, 400
_MOST_PROMPT = 7424
# Time until the next turn: the answer is generated, and the tool runs.
_MEAN_PAUSE_S = 8.0
# Share of batch jobs. They are all there from the start, and have long answers.
_BATCH_SHARE = 0.25
_BATCH_ANSWERS = 3


def mixed_trace(
    name: str, rate: float, num_jobs: int, seed: int, *, in_bursts: bool
) -> list[TraceJob]:
    """A trace of one of ``MIXES``, with ``rate`` jobs per second in the long run.

    The jobs of ``batch-beside-chat`` have the classes ``batch`` and ``chat``.

    Args:
        in_bursts: true makes conversations, or chat jobs, begin in bursts.
    """
    if name == "agents":
        return _agents(rate, num_jobs, seed, in_bursts)
    num_batch = max(1, int(_BATCH_SHARE * num_jobs))
    num_chat = max(1, num_jobs - num_batch)
    chat = poisson_trace(
        synthetic_lengths("chat"), rate * num_chat / num_jobs, num_chat, seed, in_bursts=in_bursts
    )
    batch = [
        TraceJob(
            0.0,
            job.prompt_tokens,
            min(1024, _BATCH_ANSWERS * job.output_tokens),
            service=ServiceClass("batch"),
        )
        for job in poisson_trace(synthetic_lengths("chat"), 1.0, num_batch, seed + 1)
    ]
    return merged(batch, [replace(job, service=ServiceClass("chat")) for job in chat])[:num_jobs]


def _agents(rate: float, num_jobs: int, seed: int, in_bursts: bool) -> list[TraceJob]:
    rng = np.random.default_rng(seed)
    # Twice as many turns as needed, because the last ones begin after the trace has ended.
    turns = [_conversation(rng) for _ in range(2 * num_jobs // _MEAN_TURNS + 10)]
    per_conversation = sum(map(len, turns)) / len(turns)
    gaps = rng.standard_exponential(len(turns))
    begins_s = arrival_times(gaps, rate / per_conversation, in_bursts=in_bursts)
    return merged(
        *(
            [TraceJob(begin_s + after_s, prompt, answer) for after_s, prompt, answer in turn]
            for begin_s, turn in zip(begins_s, turns, strict=True)
        )
    )[:num_jobs]


def _conversation(rng: np.random.Generator) -> list[tuple[float, int, int]]:
    """The turns: seconds since the beginning, tokens of prompt and answer."""
    turns: list[tuple[float, int, int]] = []
    after_s, prompt = 0.0, 1 + int(rng.exponential(_FIRST_PROMPT))
    for _ in range(rng.geometric(1 / _MEAN_TURNS)):
        if turns and prompt > _MOST_PROMPT:
            break
        prompt = min(prompt, _MOST_PROMPT)
        answer = min(512, 1 + int(rng.exponential(_MEAN_ANSWER)))
        turns.append((after_s, prompt, answer))
        prompt += answer + int(rng.exponential(_MEAN_RESULT))
        after_s += rng.exponential(_MEAN_PAUSE_S)
    return turns
