"""Greedy tokens are those of transformers for any number of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from fastserve_backend import SamplingParams
from parallel_models import POSITIONS, VOCAB_SIZE, ParallelLLM
from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("forked_ranks")

NUM_TOKENS = 24
NUM_PROMPTS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=20,
    seed=3,
    temperature=0.8,
    top_p=0.95,
    logprobs=2,
    prompt_logprobs=2,
    ignore_eos=True,
)
# Covers each size and each number of stages with few processes, as each has to import torch.
# tests/models covers all combinations.
DIVISIONS = [
    ("opt", 1, 2), pytest.param("opt_350m", 2, 2, marks=pytest.mark.repeated), ("llama", 2, 3),
    ("gpt_neox", 4, 1), ("gpt_oss", 2, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    lengths = [rng.randint(1, POSITIONS - NUM_TOKENS) for _ in range(NUM_PROMPTS)]
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(("name", "tensor_size", "num_stages"), DIVISIONS)
def test_tokens_are_those_of_transformers_while_jobs_are_swapped(
    name: str,
    tensor_size: int,
    num_stages: int,
    checkpoints: dict[str, tuple[Path, PreTrainedModel]],
    tokenizer: Path,
    prompts: list[list[int]],
) -> None:
    checkpoint, reference = checkpoints[name]
    with ParallelLLM(
        checkpoint,
        tokenizer,
        tensor_size,
        num_stages,
        device_blocks=24,  # all jobs together need 100
        base_quantum_ms=0.01,
        prefill_chunk_tokens=50,
    ) as llm:
        answers = [one.token_ids for one in llm.generate(prompts, GREEDY, progress=False)]
        counters = llm.engine.counters
        assert counters.preemptions > 0
        assert counters.swap_out_bytes > 0
        assert counters.swap_in_bytes > 0
    assert len({tuple(answer) for answer in answers}) > NUM_PROMPTS // 2
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("formats", [{}, {"quantization": "int8"}, {"device_dtype": "int8"}])
def test_sampled_tokens_and_log_probabilities_are_those_of_one_rank(
    formats: dict[str, str], checkpoints: dict[str, tuple[Path, PreTrainedModel]], tokenizer: Path
) -> None:
    checkpoint, _ = checkpoints["opt"]
    answers = []
    for tensor_size, num_stages in ((1, 1), (2, 2)):
        with ParallelLLM(
            checkpoint, tokenizer, tensor_size, num_stages, prefill_chunk_tokens=20, **formats
        ) as llm:
            answers.append(llm.generate([[5, 9], [7] * 30], SAMPLED, progress=False))
    for alone, together in zip(*answers, strict=True):
        assert together.token_ids == alone.token_ids
        assert len(alone.logprobs) == SAMPLED.max_tokens
        assert len(alone.prompt_logprobs) == len(alone.prompt)
        entries = [
            [*one.logprobs, *(entry for entry in one.prompt_logprobs if entry is not None)]
            for one in (alone, together)
        ]
        for one, other in zip(*entries, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-3)
            assert [token for token, _ in other.top] == [token for token, _ in one.top]
