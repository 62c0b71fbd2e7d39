"""Sampling and stopping through the engine with real ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from collector import Collector
from fastserve_backend import LLM, SamplingParams, ServiceLevel
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import FinishReason
from live_engine import small_engine
from safetensors.torch import load_file, save_file
from small_model import EOS_TOKEN_IDS, VOCAB_SIZE
from transformers import OPTForCausalLM

PROMPT = [10, 50, 90, 130, 170]
HOT = 4.0  # flattens the small model's sharp distributions


def test_a_seed_gives_the_same_text_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=99, temperature=1.2, top_p=0.95, ignore_eos=True)
    (alone,) = llm.generate([PROMPT], params, progress=False)
    company = [
        SamplingParams(max_tokens=60, seed=n, top_k=n + 1, ignore_eos=True) for n in range(8)
    ]
    together = llm.generate(
        [*([PROMPT] * 8), PROMPT, PROMPT], [*company, params, SamplingParams(seed=98)],
        progress=False,
    )  # fmt: skip
    assert together[8].token_ids == alone.token_ids
    assert together[8].text == alone.text
    assert together[9].token_ids != alone.token_ids[:16]


def test_each_prompt_has_its_service_level(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    tokens = llm.engine.counters.tenant_tokens
    levels = [ServiceLevel(tenant="one"), ServiceLevel(-1, tenant="two")]
    llm.generate([PROMPT, PROMPT], params, service=levels, progress=False)
    assert (tokens["one"], tokens["two"]) == (7, 7)
    llm.generate([PROMPT, PROMPT], params, service=levels[0], progress=False)
    assert (tokens["one"], tokens["two"]) == (21, 7)
    with pytest.raises(InvalidRequestError, match=r"^service: got 1; must be one for all 2"):
        llm.generate([PROMPT, PROMPT], params, service=levels[:1], progress=False)
    before = llm.engine.counters.prompt_tokens
    for bad, message in (
        (ServiceLevel(101), "priority: got 101"),
        (ServiceLevel(tpot_slo_s=0), "tpot_slo_ms: got 0"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate([PROMPT, PROMPT], params, service=[levels[0], bad], progress=False)
    assert llm.engine.counters.prompt_tokens == before


def test_without_a_seed_texts_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.5, ignore_eos=True)
    first, second = llm.generate([PROMPT, PROMPT], params, progress=False)
    assert first.token_ids != second.token_ids


def test_logprobs_are_those_of_the_reference(llm: LLM, reference: OPTForCausalLM) -> None:
    params = SamplingParams(max_tokens=12, seed=4, temperature=1.3, logprobs=3, ignore_eos=True)
    (completion,) = llm.generate([PROMPT], params, progress=False)
    ids = torch.tensor([PROMPT + completion.token_ids])
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(ids).logits[0].float(), -1)
    assert len(completion.logprobs) == 12
    for index, entry in enumerate(completion.logprobs):
        row = logprobs[len(PROMPT) - 1 + index]
        assert entry.token_id == completion.token_ids[index]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        best = row.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
    assert completion.stats is not None
    total = sum(entry.logprob for entry in completion.logprobs)
    assert completion.stats.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_end_of_sequence(llm: LLM) -> None:
    ends = set(EOS_TOKEN_IDS)
    params = [SamplingParams(max_tokens=200, seed=n, temperature=HOT) for n in range(10)]
    completions = llm.generate([PROMPT] * 10, params, progress=False)
    seed, token_ids = next(
        (n, completion.token_ids)
        for n, completion in enumerate(completions)
        if 5 <= len(completion.token_ids) <= 150
    )
    assert completions[seed].finish_reason is FinishReason.STOP
    assert token_ids[-1] in ends
    assert not ends & set(token_ids[:-1])
    length = len(token_ids)
    options = {"seed": seed, "temperature": HOT}
    ignoring, later, exact = llm.generate(
        [PROMPT] * 3,
        [
            SamplingParams(max_tokens=length + 3, ignore_eos=True, **options),
            SamplingParams(max_tokens=length + 3, min_tokens=length + 2, **options),
            SamplingParams(max_tokens=length, **options),
        ],
        progress=False,
    )
    assert len(ignoring.token_ids) == length + 3
    assert ignoring.token_ids[:length] == token_ids
    assert ignoring.finish_reason is FinishReason.LENGTH
    assert len(later.token_ids) >= length + 2
    assert not ends & set(later.token_ids[: length + 1])
    assert exact.finish_reason is FinishReason.STOP


def test_a_job_whose_logits_are_nan_ends_alone_with_an_error(
    llm: LLM, checkpoint: Path, tokenizer: Path, tmp_path: Path
) -> None:
    damaged, position = tmp_path / "damaged", 50
    shutil.copytree(checkpoint, damaged)
    weights = load_file(damaged / "model.safetensors")
    # OPT's positions begin at row 2 of the table.
    weights["model.decoder.embed_positions.weight"][2 + position] = float("nan")
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    prompts = [[5], [6] * 40]
    short, long = llm.generate(prompts, params, progress=False)
    with small_engine(damaged, tokenizer, device_blocks=8) as other:
        for _ in range(3):  # in blocks that hold NaN
            sinks = [Collector(), Collector()]
            for prompt, sink in zip(prompts, sinks, strict=True):
                other.engine.submit("j", prompt, params, sink)
            assert sinks[0].wait().finish_reason is FinishReason.LENGTH
            assert sinks[0].token_ids == short.token_ids
            end = sinks[1].wait()
            assert end.finish_reason is FinishReason.ERROR
            assert end.error is not None
            assert "the checkpoint is damaged" in end.error
            assert sinks[1].token_ids == long.token_ids[: position - 40 + 1]


def test_stop_words_end_the_text_and_free_the_job(llm: LLM) -> None:
    base = {"max_tokens": 120, "seed": 8, "temperature": 1.4, "ignore_eos": True}
    (whole,) = llm.generate([PROMPT], SamplingParams(**base), progress=False)
    word = whole.text[40:44]  # in single-byte tokens, so the word spans several of them
    assert len(word) == 4
    at = whole.text.find(word)
    (stopped,) = llm.generate([PROMPT], SamplingParams(**base, stop=(word,)), progress=False)
    assert stopped.text == whole.text[:at]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert stopped.stats is not None
    assert stopped.stats.num_output_tokens == len(stopped.token_ids) < 120
    (both,) = llm.generate(
        [PROMPT], SamplingParams(**base, stop=(word,), min_tokens=100), progress=False
    )
    assert len(both.token_ids) >= 100


def test_a_stop_token_ends_the_job_without_its_text(llm: LLM) -> None:
    base = {"max_tokens": 120, "seed": 8, "temperature": 1.4, "ignore_eos": True}
    (whole,) = llm.generate([PROMPT], SamplingParams(**base), progress=False)
    stop = whole.token_ids[20]
    length = whole.token_ids.index(stop) + 1
    params = [
        SamplingParams(**base, stop_token_ids=[stop, VOCAB_SIZE - 1]),
        SamplingParams(**base, stop_token_ids=[stop], min_tokens=length + 5),
    ]
    stopped, later = llm.generate([PROMPT] * 2, params, progress=False)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == whole.token_ids[:length]
    assert stopped.text == llm.engine.tokenizer.decode(stopped.token_ids[:-1])
    assert stop not in later.token_ids[: length + 4]
    assert len(later.token_ids) >= length + 5


def test_stop_words_that_name_special_tokens(llm: LLM) -> None:
    a = llm.engine.tokenizer.encode("a")[-1]
    spelling = {a: "a", 0: "<s>", 2: "</s>"}
    biases = dict.fromkeys(spelling, 100.0)
    base = {"max_tokens": 80, "seed": 3, "temperature": HOT, "ignore_eos": True}
    params = SamplingParams(**base, logit_bias=biases)
    (whole,) = llm.generate([PROMPT], params, progress=False)
    assert set(whole.token_ids) == set(spelling)
    ends = [slice(n, n + length) for n in range(0, 60, 5) for length in (1, 2, 5)]
    words = ["".join(spelling[token] for token in whole.token_ids[end]) for end in ends]
    words = [word for word in dict.fromkeys(words) if "<" in word]
    assert {word[0] for word in words} == {"a", "<"}
    assert {word[-1] for word in words} == {"a", ">"}
    each = [replace(params, stop=word) for word in words]
    for word, stopped in zip(
        words, llm.generate([PROMPT] * len(words), each, progress=False), strict=True
    ):
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        # Special tokens that the word does not name do not interrupt it.
        pieces = [spelling[token] for token in whole.token_ids]
        spelled = "".join(piece for piece in pieces if piece in word or piece == "a")
        assert stopped.text == "a" * spelled[: spelled.index(word)].count("a"), word


def test_a_stop_word_that_the_last_token_completes(llm: LLM) -> None:
    a, b = (llm.engine.tokenizer.encode(letter)[-1] for letter in "ab")
    base = SamplingParams(
        max_tokens=50,
        min_tokens=3,
        seed=1,
        temperature=HOT,
        logit_bias={a: 100, b: 98},
        stop_token_ids=[b],
    )
    params = [base, replace(base, stop="ab"), replace(base, stop="aba")]
    plain, stopped, other = llm.generate([PROMPT] * 3, params, progress=False)
    assert plain.token_ids[-1] == b
    assert plain.text == other.text == "a" * (len(plain.token_ids) - 1)
    assert stopped.text == plain.text[:-1]
    assert {one.finish_reason for one in (plain, stopped, other)} == {FinishReason.STOP}


def test_times_and_counts_are_plausible(llm: LLM) -> None:
    completions = llm.generate([PROMPT] * 15, SamplingParams(max_tokens=9), progress=False)
    for completion in completions:
        stats = completion.stats
        assert stats is not None
        assert stats.num_input_tokens == len(PROMPT)
        assert stats.num_output_tokens == len(completion.token_ids)
        assert stats.first_scheduled_s is not None
        assert stats.first_token_s is not None
        assert stats.last_token_s is not None
        assert (
            stats.arrival_s <= stats.first_scheduled_s < stats.first_token_s <= stats.last_token_s
        )


def test_text_prompts_are_encoded_and_results_are_in_order(llm: LLM) -> None:
    texts = ["one", "two and a half", "three"]
    greedy = SamplingParams(max_tokens=5, temperature=0)
    together = llm.generate(texts, greedy, progress=False)
    assert [completion.prompt for completion in together] == texts
    for text, completion in zip(texts, together, strict=True):
        ids = llm.engine.checks.encode(text)
        (again,) = llm.generate([ids], greedy, progress=False)
        assert again.token_ids == completion.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", SamplingParams(), "text_input"),
        (b"Hello", SamplingParams(), "text_input"),
        ([], SamplingParams(), "input_ids"),
        ([5, 384], SamplingParams(), "input_ids"),
        ([-1], SamplingParams(), "input_ids"),
        ("x" * 5000, SamplingParams(), "text_input"),
        ("x" * 320, SamplingParams(), "text_input"),
        ([5] * 310, SamplingParams(max_tokens=11), "max_tokens"),
    ],
)
def test_impossible_prompts_are_refused(
    llm: LLM, prompt: str | bytes | list[int], params: SamplingParams, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[7, 8], prompt], params, progress=False)
    assert caught.value.field == field
    (fine,) = llm.generate([[7, 8]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
    assert len(fine.token_ids) == 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_parameters_as_prompts(llm: LLM, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"params: got {count}; must be one for all 2"):
        llm.generate([[7, 8], [9]], [SamplingParams(max_tokens=2)] * count, progress=False)
