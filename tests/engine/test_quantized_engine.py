"""Greedy tokens of quantized checkpoints through the engine are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from decoder_checkpoints import SIZES
from fastserve_backend import LLM, SamplingParams
from quantized_checkpoints import FORMATS, save_quantized
from rotary_checkpoints import random_model
from transformers import LlamaConfig

pytestmark = pytest.mark.usefixtures("forked_ranks")

VOCAB_SIZE = 301
NUM_TOKENS = 24


@pytest.mark.parametrize(
    ("name", "tensor_size", "num_stages"), [("awq_64", 1, 1), ("gptq_4_32_act_order", 2, 2)]
)
def test_tokens_are_those_of_transformers(
    name: str, tensor_size: int, num_stages: int, tmp_path: Path, tokenizer: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "bos_token_id": 2, "eos_token_id": 2}
    theirs = random_model(LlamaConfig(**SIZES | sizes))
    save_quantized(theirs, tmp_path, FORMATS[name])
    rng = random.Random(4)
    prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 20)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(
        str(tmp_path),
        tokenizer=str(tokenizer),
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=num_stages,
        device_blocks=20,
        swap_space_gib=0.1,
    ) as llm:
        answers = [one.token_ids for one in llm.generate(prompts, params, progress=False)]
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
