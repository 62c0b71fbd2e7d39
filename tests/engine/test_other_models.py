"""Greedy tokens of each family through the engine are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import FAMILIES, long_rope
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.rank_protocol.layer_kinds import BlockNeeds
from matrices import rounds
from rotary_checkpoints import randomize
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

VOCAB_SIZE = 600
POSITIONS = 400
NUM_TOKENS = rounds(100, many=200)
LONGEST_PROMPT = 200
CHUNK = 48
SWITCH = 150
"""Longer contexts of phi3_long have another rotation."""
CAPPED_TIE = 1e-5
"""Soft caps bring large logits so near to each other that the rounding of tanh decides."""
SUMMED_TIE = 5e-6
"""Ranks add in another order than transformers: a few units in the last place of a logit."""
# Those that differ most from LLaMA and from each other.
FIRST = ("gpt_neox", "cohere2", "gemma2_capped", "gpt_oss", "olmo2", "phi3_long", "smollm3_windows")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
LONG = {"rope_parameters": long_rope(8, SWITCH)}
MODELS = ("llama", "gpt_neox", *FAMILIES)


def config_of(name: str, tensor_size: int) -> PreTrainedConfig:
    """tensor_size: ranks that share the heads."""
    if name == "llama":
        return LlamaConfig(**SHAPE, num_key_value_heads=2)
    if name == "gpt_neox":
        return GPTNeoXConfig(**SHAPE)
    variant = FAMILIES[name]
    window = {"sliding_window": 50} if variant.has_windows else {}
    long = LONG if name == "phi3_long" else {}
    return variant.config(**SHAPE | window | long, divides=tensor_size > 1)


def repeated_unless(is_first: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if is_first else (pytest.mark.repeated,)


@pytest.mark.parametrize(
    ("name", "tensor_size", "num_stages"),
    [
        *(pytest.param(one, 1, 1, marks=repeated_unless(one in FIRST)) for one in MODELS),
        # test_parallel_tokens.py divides a model with windows so.
        *(pytest.param(one, 2, 2, marks=pytest.mark.repeated) for one in MODELS),
    ],
)
def test_tokens_are_those_of_transformers_while_jobs_are_swapped(
    name: str, tensor_size: int, num_stages: int, tmp_path: Path, tokenizer: Path
) -> None:
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(config_of(name, tensor_size)).eval()
    randomize(reference, 0.4)
    reference.save_pretrained(tmp_path)
    rng = random.Random(9)
    prompts = [
        [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, LONGEST_PROMPT))]
        for _ in range(8)
    ]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    kinds = load_model_config(str(tmp_path), load_format="dummy").layer_groups.kinds
    with LLM(
        str(tmp_path),
        tokenizer=str(tokenizer),
        max_num_seqs=5,
        prefill_chunk_tokens=CHUNK,
        device_blocks=int(2.8 * BlockNeeds(16, kinds, CHUNK).most(POSITIONS)),
        swap_space_gib=0.1,
        base_quantum_ms=0.01,
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=num_stages,
        check_integrity=True,
    ) as llm:
        answers = [one.token_ids for one in llm.generate(prompts, params, progress=False)]
        assert llm.engine.counters.swap_in_bytes > 0
    assert len({tuple(answer) for answer in answers}) == len(answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        logits = logits_of(reference, prompt + answer, SWITCH if name == "phi3_long" else None)
        logits = logits[len(prompt) - 1 : -1]
        lost = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        tie = SUMMED_TIE if tensor_size > 1 else 0.0
        assert lost.max() <= (CAPPED_TIE if "capped" in name else tie), lost.max()


@torch.inference_mode()
def logits_of(reference: PreTrainedModel, tokens: list[int], switch: int | None) -> torch.Tensor:
    """transformers' logits at each position of a job that got one token after the other."""
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    if switch is not None:  # up to there the job had the rotation of short contexts
        logits[:switch] = reference(torch.tensor([tokens[:switch]])).logits[0]
    return logits
