"""On real ranks, jobs that use the KV of earlier or running jobs get the same tokens as without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collector import Collector
from fastserve_backend import LLM, SamplingParams
from live_engine import small_engine
from small_model import VOCAB_SIZE
from waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("forked_ranks")

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tokenizer: Path) -> Iterator[LLM]:
    """An engine without prefix caching and with memory for all jobs."""
    with small_engine(
        checkpoint, tokenizer, prefix_caching=False, device_blocks=600, max_num_seqs=10
    ) as llm:
        yield llm
        assert llm.engine.counters.prefix_cached_tokens == 0


@pytest.fixture
def small(checkpoint: Path, tokenizer: Path) -> Callable[..., Any]:
    return lambda **options: small_engine(checkpoint, tokenizer, **options)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(4, VOCAB_SIZE) for _ in range(count)]


def answers(llm: LLM, prompts: Prompts, params: SamplingParams = GREEDY) -> Prompts:
    return [one.token_ids for one in llm.generate(prompts, params, progress=False)]


def conversations(llm: LLM, openings: Prompts, additions: list[Prompts]) -> list[Prompts]:
    """The answers of each turn. A turn's prompt is the conversation so far and an addition."""
    prompts, turns = openings, []
    for addition in additions:
        turns.append(answers(llm, prompts))
        prompts = [
            prompt + answer + more
            for prompt, answer, more in zip(prompts, turns[-1], addition, strict=True)
        ]
    return turns


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
)
def test_conversations_go_on_from_kept_kv(
    plain: LLM, small: Callable[..., Any], options: dict[str, int]
) -> None:
    rng = random.Random(3)
    system = random_tokens(rng, 50)
    openings = [system + random_tokens(rng, rng.randint(1, 30)) for _ in range(4)]
    additions = [[random_tokens(rng, rng.randint(1, 20)) for _ in openings] for _ in range(4)]
    expected = conversations(plain, openings, additions)
    with small(**options) as llm:
        assert conversations(llm, openings, additions) == expected
        # All turns but the first start after the full blocks of the previous turn.
        least = sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in openings) * 3
        assert llm.engine.counters.prefix_cached_tokens >= least
    assert len({tuple(answer) for turn in expected for answer in turn}) == 16


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_tokens": 7}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
)
def test_running_jobs_are_begun_with(
    plain: LLM, small: Callable[..., Any], options: dict[str, int]
) -> None:
    rng = random.Random(11)
    system = random_tokens(rng, 50)
    prompts = [system + random_tokens(rng, rng.randint(1, 30)) for _ in range(6)]
    # So do a prompt whose own part is one block, and a prompt without a part of its own.
    prompts += [prompts[0] + random_tokens(rng, 3), prompts[0][:48], prompts[0]]
    expected = answers(plain, prompts)
    with small(device_blocks=100, **options) as llm:
        first = Collector()
        long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        llm.engine.submit("first", prompts[0], long, first)
        assert first.started.wait(DEADLINE_S)
        assert answers(llm, prompts) == expected
        assert llm.engine.counters.prefix_cached_tokens >= 8 * 48 + 32
        first.wait()
        assert first.token_ids[:20] == expected[0]


@pytest.mark.parametrize("strategy", ["recompute", "reactive", "proactive"])
def test_short_memory_changes_no_token(
    plain: LLM, small: Callable[..., Any], strategy: str
) -> None:
    """Many jobs share few beginnings. They do not all fit, so some leave and come back."""
    rng = random.Random(5)
    beginnings = [random_tokens(rng, length) for length in (16, 40, 64)]
    prompts = [
        rng.choice(beginnings) + random_tokens(rng, rng.randint(1, 24)) for _ in range(40)
    ] + beginnings
    expected = answers(plain, prompts)
    with small(strategy=strategy, device_blocks=24, max_num_seqs=6, base_quantum_ms=0.01) as llm:
        assert answers(llm, prompts) == expected
        assert answers(llm, prompts) == expected
        counters = llm.engine.counters
        assert counters.prefix_cached_tokens > 0
        assert counters.preemptions > 0


def test_a_prompt_that_is_known_to_its_end_gets_the_token_that_it_got(
    plain: LLM, small: Callable[..., Any]
) -> None:
    """This also holds for chunks, for sampling, and with a penalty on the prompt's tokens."""
    rng = random.Random(7)
    prompts = [random_tokens(rng, length) for length in (16, 17, 32, 48, 100)]
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=4, repetition_penalty=1.3)
    expected = answers(plain, prompts, params)
    with small(prefill_chunk_tokens=20) as llm:
        for number in range(3):
            assert answers(llm, prompts, params) == expected
            assert llm.engine.counters.prefix_cached_tokens == number * (0 + 16 + 16 + 32 + 96)
