"""Jobs many windows long get transformers' tokens, however their KV moves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from collector import Collector
from decoder_checkpoints import FAMILIES
from fastserve_backend import LLM, SamplingParams
from live_engine import small_engine, wait_until_free
from transformers import AutoModelForCausalLM, PreTrainedModel
from waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("forked_ranks")

WINDOW = 24
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
# A full layer beside ten with windows, and windows alone.
SLIDING = 5 * ["sliding_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 11, "layer_types": [*SLIDING, "full_attention", *SLIDING]},
    "mistral": {"num_hidden_layers": 3},
}
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    shape = {"vocab_size": 600, "max_position_embeddings": 600, "sliding_window": WINDOW}
    config = FAMILIES[request.param].config(**shape | MODELS[request.param])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.4)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return directory, model


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(4, 600) for _ in range(count)]


def check_answers(model: PreTrainedModel, llm: LLM, prompts: Prompts) -> Prompts:
    """The answers, each of whose tokens is the model's choice."""
    answers = [one.token_ids for one in llm.generate(prompts, GREEDY, progress=False)]
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
    assert len({tuple(answer) for answer in answers}) == len(answers)
    return answers


OPTIONS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"device_blocks": 120, "prefill_chunk_tokens": 20, "base_quantum_ms": 0.01},
    {"pipeline_parallel_size": 2, "prefill_chunk_tokens": 50},
    {"device_blocks": 120, "prefill_chunk_tokens": 20, "strategy": "recompute"},
    {},
    {"prefill_chunk_tokens": 30},
]
REPEATED = pytest.mark.repeated


@pytest.mark.parametrize(
    ("reference", "options"),
    [
        *(("gemma3", one) for one in OPTIONS[:3]),
        ("mistral", OPTIONS[3]),
        *(pytest.param("gemma3", one, marks=REPEATED) for one in OPTIONS[3:]),
        *(pytest.param("mistral", one, marks=REPEATED) for one in OPTIONS if one != OPTIONS[3]),
    ],
    indirect=["reference"],
    ids=str,
)
def test_conversations_go_on_from_kv_of_others(
    reference: tuple[Path, PreTrainedModel], tokenizer: Path, options: dict[str, Any]
) -> None:
    """Jobs begin alike, all at once, and each later turn begins with an earlier one."""
    directory, model = reference
    rng = random.Random(3)
    system = random_tokens(rng, 6 * WINDOW)
    prompts = [system + random_tokens(rng, rng.randint(1, 3 * WINDOW)) for _ in range(5)]
    cached, num_known = list[int](), list[int]()
    with small_engine(directory, tokenizer, **{"device_blocks": 900} | options) as llm:
        source = Collector()
        endless = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
        llm.engine.submit("source", [*system, 5], endless, source)
        assert source.started.wait(DEADLINE_S)
        for _ in range(3):
            answers = check_answers(model, llm, prompts)
            cached.append(llm.engine.counters.prefix_cached_tokens)
            turns = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            prompts = [turn + random_tokens(rng, rng.randint(1, 20)) for turn in turns]
            num_known.append(sum((len(turn) - 1) // 16 * 16 for turn in turns))
        source.wait()
        wait_until_free(llm)
    if "prefill_chunk_tokens" not in options:  # then memory lasts for all
        assert cached[0] == len(prompts) * (len(system) // 16 * 16)
        assert cached[2] - cached[1] == num_known[1]
