"""Log-probabilities of prompts are those of transformers, however the prompts are computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_backend import LLM, Completion, SamplingParams
from fastserve_backend.engine.request_checks import MAX_PROMPT_LOGPROBS
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import ServiceLevel
from fastserve_backend.profile.latency import LatencyProfile
from live_engine import small_engine
from small_model import MAX_MODEL_LEN, VOCAB_SIZE
from transformers import MistralConfig, MistralForCausalLM, OPTForCausalLM, PreTrainedModel

pytestmark = pytest.mark.usefixtures("forked_ranks")

TOLERANCE = 1e-4
"""The model's logits reach 60, of which float32 keeps seven digits."""
TOP = 3
BLOCK_SIZE = 16


def scoring(**changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 1, "prompt_logprobs": TOP, "temperature": 0, "ignore_eos": True} | changes
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    lengths = [1, 2, 3, BLOCK_SIZE, 50, 117, 200, MAX_MODEL_LEN - 1]
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def check(prompt: list[int], completion: Completion, reference: PreTrainedModel) -> None:
    with torch.inference_mode():
        exact = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    first, *others = completion.prompt_logprobs
    assert first is None
    assert len(others) == len(prompt) - 1
    for token_id, entry, row in zip(prompt[1:], others, exact, strict=False):
        assert entry is not None
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        assert entry.rank == 1 + int((row > row[token_id]).sum())
        top = row.topk(TOP)
        assert [one for one, _ in entry.top] == top.indices.tolist()
        logprobs = [logprob for _, logprob in entry.top]
        assert logprobs == pytest.approx(top.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_tokens": 1, "max_num_batched_tokens": 10},
        {"prefill_chunk_tokens": 13},
        {
            "device_blocks": 24,
            "strategy": "recompute",
            "policy": "skip_join_mlfq",
            "base_quantum_ms": 0.01,
            "prefill_chunk_tokens": 30,
        },
    ],
    ids=str,
)
def test_chunks_and_preemption(
    checkpoint: Path,
    tokenizer: Path,
    reference: OPTForCausalLM,
    prompts: list[list[int]],
    options: dict[str, Any],
) -> None:
    """Other jobs, which take prefixes and want other things, run beside them."""
    with small_engine(checkpoint, tokenizer, **{"device_blocks": 200} | options) as llm:
        others = [prompt[: len(prompt) // 2 + 1] for prompt in prompts]
        params = [
            scoring(max_tokens=min(20, MAX_MODEL_LEN - len(prompt)), prompt_logprobs=wanted)
            for wanted, all_prompts in ((TOP, prompts), (None, others))
            for prompt in all_prompts
        ]
        answers = llm.generate([*prompts, *others], params, progress=False)
        for prompt, answer in zip(prompts, answers, strict=False):
            check(prompt, answer, reference)
        assert not any(one.prompt_logprobs for one in answers[len(prompts) :])
        if "strategy" in options:
            assert llm.engine.counters.recomputed_jobs > 0


def test_chunks_are_smaller_where_log_probabilities_are_wanted(
    checkpoint: Path, tokenizer: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this small model they cost next to nothing. Here ten of them take as long as a chunk."""

    def score_s(self: LatencyProfile, num_tokens: int) -> float:
        return self.prefill_s(40) * num_tokens / 10

    monkeypatch.setattr(LatencyProfile, "score_s", score_s)
    (prompt,) = (one for one in prompts if len(one) == 200)
    with small_engine(checkpoint, tokenizer, prefill_chunk_tokens=40) as llm:
        counts = []
        for wanted in (None, TOP):
            before = llm.engine.counters.iterations
            llm.generate([prompt], scoring(prompt_logprobs=wanted), progress=False)
            counts.append(llm.engine.counters.iterations - before)
    plain, scored = counts
    assert plain == 5
    assert scored > 6


@pytest.mark.parametrize("window", [None, 20])
def test_a_model_of_the_llama_family(tmp_path: Path, tokenizer: Path, window: int | None) -> None:
    torch.manual_seed(5)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_MODEL_LEN,
            sliding_window=window,
            initializer_range=0.3,
        )
    ).eval()
    model.save_pretrained(tmp_path)
    prompt = [7 * place % VOCAB_SIZE for place in range(4, 100)]
    with small_engine(tmp_path, tokenizer, prefill_chunk_tokens=40) as llm:
        for _ in range(2):
            for answer in llm.generate([prompt, prompt], scoring(), progress=False):
                check(prompt, answer, model)


def test_they_are_those_of_output_tokens(llm: LLM, prompts: list[list[int]]) -> None:
    prompt = prompts[4]
    wanted = scoring(max_tokens=30, prompt_logprobs=None, logprobs=TOP)
    (answer,) = llm.generate([prompt], wanted, progress=False)
    (again,) = llm.generate([prompt + answer.token_ids], scoring(), progress=False)
    for own, of_prompt in zip(answer.logprobs, again.prompt_logprobs[len(prompt) :], strict=True):
        assert of_prompt is not None
        assert of_prompt.rank == 1
        assert of_prompt.logprob == pytest.approx(own.logprob, abs=TOLERANCE)
        assert [token for token, _ in of_prompt.top] == [token for token, _ in own.top]


def test_the_prompt_is_computed_whole_and_then_others_need_not(
    llm: LLM, reference: OPTForCausalLM
) -> None:
    prompt = [11 * place % VOCAB_SIZE for place in range(4, 84)]
    plain = scoring(prompt_logprobs=None)
    cached = []
    for params in (plain, scoring(), plain):
        (answer,) = llm.generate([prompt], params, progress=False)
        assert answer.stats is not None
        cached.append(answer.stats.num_cached_tokens)
        if params.prompt_logprobs is not None:
            check(prompt, answer, reference)
    assert cached == [0, 0, 64]


def test_a_turn_takes_nothing_from_its_session(llm: LLM, reference: OPTForCausalLM) -> None:
    prompt = [13 * place % VOCAB_SIZE for place in range(4, 84)]
    session = ServiceLevel(session_id="scored")
    for params in (scoring(prompt_logprobs=None), scoring(), scoring(prompt_logprobs=None)):
        (answer,) = llm.generate([prompt], params, service=session, progress=False)
        prompt += answer.token_ids
    assert answer.stats is not None
    assert answer.stats.num_cached_tokens >= 80  # of the turn before
    (answer,) = llm.generate([prompt], scoring(), service=session, progress=False)
    check(prompt, answer, reference)


def test_only_the_first_output_has_them(llm: LLM) -> None:
    (answer,) = llm.generate([[5, 6]], scoring(max_tokens=5, prompt_logprobs=0), progress=False)
    assert [entry and entry.top for entry in answer.prompt_logprobs] == [None, ()]


def test_too_many_are_refused(llm: LLM) -> None:
    # No model here has so long a context.
    tokens = [5] * (MAX_PROMPT_LOGPROBS // 4 + 1)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: got 3; must be at most 2"):
        llm.engine.checks.validate(tokens, scoring())
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: got 0; must be left out"):
        llm.engine.checks.validate(tokens * 4, scoring(prompt_logprobs=0))
