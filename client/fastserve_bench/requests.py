"""The requests of a trace: each job's prompt, and how its answer ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fastserve_client.errors import WorkloadError

from fastserve_bench.connection import Request
from fastserve_bench.workload import TraceJob

# Vocabularies begin with special tokens: end, padding, roles of a chat.
FIRST_TOKEN_ID = 32


def exact_requests(
    trace: Sequence[TraceJob], vocab_size: int, seed: Sequence[int]
) -> list[Request]:
    """Requests with random prompts of the trace's lengths, and with answers of its lengths.

    The same arguments make the same prompts. No two prompts share a beginning, so that no server
    can answer from a cache of prefixes.

    Args:
        vocab_size: Token ids are below this number.
        seed: Any number of integers.

    Raises:
        WorkloadError: a vocabulary with too few tokens.
    """
    if vocab_size <= FIRST_TOKEN_ID:
        raise WorkloadError(f"vocab_size: got {vocab_size}; must be more than {FIRST_TOKEN_ID}")
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(FIRST_TOKEN_ID, vocab_size, job.prompt_tokens).tolist(),
            job.output_tokens,
            exact=True,
            service=job.service,
        )
        for job in trace
    ]


def natural_requests(trace: Sequence[TraceJob], max_tokens: int, chat: bool) -> list[Request]:
    """Requests with the data set's own prompts. Answers end by themselves, or at ``max_tokens``.

    Args:
        chat: true sends the prompts as messages of users, for the model's chat template.

    Raises:
        WorkloadError: the data set has only lengths.
    """
    requests = []
    for job in trace:
        if job.prompt is None:
            raise WorkloadError(
                "natural_lengths: got a data set without texts; needs ShareGPT or Alpaca JSON"
            )
        requests.append(
            Request(job.prompt, max_tokens, exact=False, chat=chat, service=job.service)
        )
    return requests
