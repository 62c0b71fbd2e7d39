"""Urgent jobs beside long ones, through an engine with real ranks and little KV memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.config import EngineConfig
from small_model import VOCAB_SIZE

from benchmarks.urgent_job import random_prompts, run_urgent_jobs

pytestmark = pytest.mark.usefixtures("forked_ranks")

NUM_LONG, NUM_URGENT = 40, 6
LONG_TOKENS, URGENT_TOKENS = 120, 10
IDS = range(4, VOCAB_SIZE)
LONG = random_prompts(NUM_LONG, IDS, range(5, 41), seed=1)
URGENT = random_prompts(NUM_URGENT, IDS, range(5, 41), seed=2)
LITTLE_MEMORY = {"max_num_seqs": 16, "device_blocks": 60, "swap_space_gib": 0.02}
"""The long jobs of an iteration would need twice as many blocks at their ends."""


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The tokens with memory for all, the long and the urgent jobs apart from each other."""
    answers = []
    for prompts, num_tokens in ((LONG, LONG_TOKENS), (URGENT, URGENT_TOKENS)):
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        answers += [one.token_ids for one in llm.generate(prompts, params, progress=False)]
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "fcfs"},
        {"strategy": "reactive", "policy": "skip_join_mlfq"},
        {"strategy": "recompute"},
        {"swap_space_gib": 0.0, "policy": "fcfs"},
        {"swap_space_gib": 0.001},
    ],
    ids=str,
)
def test_an_urgent_job_has_its_first_token_in_the_next_iteration_that_waits_for_no_copies(
    checkpoint: Path, tokenizer: Path, expected: list[list[int]], options: dict[str, object]
) -> None:
    keys = LITTLE_MEMORY | options
    config = EngineConfig().with_keys(model=str(checkpoint), tokenizer=str(tokenizer), **keys)
    run = run_urgent_jobs(
        config,
        LONG,
        URGENT,
        priority=-1,
        long_tokens=LONG_TOKENS,
        urgent_tokens=URGENT_TOKENS,
        check_integrity=True,
    )
    assert max(run.without_copies) <= 1
    assert run.answers == expected
    assert run.counters.preemptions > 0
    if options.get("strategy") == "recompute" or "swap_space_gib" in options:
        assert run.counters.recomputed_jobs > 0
    else:
        assert run.counters.swap_in_bytes > 0
