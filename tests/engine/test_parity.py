"""The engine's greedy tokens are those of transformers, whatever other jobs run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_backend import LLM, Completion, SamplingParams
from live_engine import wait_until_free
from small_model import MAX_MODEL_LEN, VOCAB_SIZE
from transformers import OPTForCausalLM

pytestmark = pytest.mark.usefixtures("forked_ranks")

NUM_TOKENS = 210
SHORT = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    lengths = [rng.randint(1, MAX_MODEL_LEN - NUM_TOKENS) for _ in range(22)]
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def expected(llm: LLM, reference: OPTForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """The engine's answers with all prompts in one batch, each token the reference's choice.

    An answer is the reference's greedy one exactly if each token is the most likely one after its
    predecessors. One forward pass over the whole answer shows this for all positions.
    """
    answers = tokens(llm.generate(prompts, GREEDY, progress=False))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
    return answers


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_batched_together_equals_the_reference(expected: list[list[int]]) -> None:
    assert [len(answer) for answer in expected] == [NUM_TOKENS] * 22
    # Degenerate answers would make the comparisons below pass whatever the engine does.
    assert len({tuple(answer) for answer in expected}) == len(expected)
    assert all(len(set(answer)) > 3 for answer in expected)


def test_in_another_order_and_company(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    company = [SamplingParams(max_tokens=n % 37 + 1, seed=n, ignore_eos=True) for n in order]
    mixed = [prompt for index in order for prompt in (prompts[index], prompts[index][:5])]
    params = [one for other in company for one in (GREEDY, other)]
    completions = llm.generate(mixed, params, progress=False)
    assert tokens(completions[::2]) == [expected[index] for index in order]


def test_one_after_another(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for index in (0, 7):
        assert tokens(llm.generate([prompts[index]], GREEDY, progress=False)) == [expected[index]]


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_tokens": 1, "max_num_batched_tokens": 10},
        {"prefill_chunk_tokens": 13, "policy": "fcfs"},
        {"prefill_chunk_tokens": 50, "max_num_seqs": 22},
        {"prefill_chunk_tokens": 2048},
    ],
    ids=str,
)
def test_prefill_in_chunks(
    checkpoint: Path,
    tokenizer: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    options: dict[str, Any],
) -> None:
    """Tokens do not depend on where a prompt is cut, nor on the rest of the batch."""
    sampled = SamplingParams(
        max_tokens=30, seed=3, temperature=1.1, repetition_penalty=1.2, logprobs=2, ignore_eos=True
    )
    with LLM(
        str(checkpoint),
        tokenizer=str(tokenizer),
        device_blocks=600,
        swap_space_gib=0.01,
        check_integrity=True,
        **({"max_num_seqs": 10} | options),
    ) as chunked:
        params = [SHORT if index % 3 else sampled for index in range(len(prompts))]
        answers = chunked.generate(prompts, params, progress=False)
        greedy = [index for index in range(len(prompts)) if index % 3]
        assert tokens([answers[index] for index in greedy]) == [
            expected[index][: SHORT.max_tokens] for index in greedy
        ]
        (alone,) = chunked.generate([prompts[0]], sampled, progress=False)
        assert alone.token_ids == answers[0].token_ids
        assert len(answers[0].logprobs) == 30
        wait_until_free(chunked)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "skip_join_mlfq", "base_quantum_ms": 0.01, "prefill_chunk_tokens": 30},
        {"policy": "srpt", "block_size": 8, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_with_too_few_blocks_for_all(
    checkpoint: Path,
    tokenizer: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    options: dict[str, Any],
) -> None:
    """Jobs lose their KV and recompute it, with the same tokens."""
    defaults = {"max_num_seqs": 10, "block_size": 16}
    options = defaults | options
    needed = sum(
        -(-(len(prompt) + SHORT.max_tokens) // options["block_size"]) for prompt in prompts
    )
    blocks = max(needed * 3 // 10, MAX_MODEL_LEN // options["block_size"])
    with LLM(
        str(checkpoint),
        tokenizer=str(tokenizer),
        device_blocks=blocks,
        strategy="recompute",
        check_integrity=True,
        **options,
    ) as small:
        answers = tokens(small.generate(prompts, SHORT, progress=False))
        assert answers == [answer[: SHORT.max_tokens] for answer in expected]
        assert small.engine.snapshot().num_blocks == blocks
        wait_until_free(small)
        if "mlfq" in options["policy"] and options["max_num_seqs"] == 10:
            assert small.engine.counters.preemptions > 0
            assert small.engine.counters.recomputed_jobs > 0
