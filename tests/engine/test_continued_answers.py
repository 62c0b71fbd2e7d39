"""An answer goes on after output that another engine gave, as if it had given all of it."""

from __future__ import annotations

from typing import Any

import pytest
from collector import Collector
from fastserve_backend import LLM, SamplingParams, StructuredOutput
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import FinishReason
from small_model import EOS_TOKEN_IDS

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPT = [10, 50, 90, 130, 170]
HOT = 4.0  # flattens the small model's sharp distributions, so that rounding decides nothing
LENGTH = 48
SEEDED: dict[str, Any] = {"temperature": HOT, "seed": 5}

ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {**SEEDED, "top_p": 0.9, "top_k": 50, "ignore_eos": True},
    "penalties": {
        "temperature": 0.0,
        "ignore_eos": True,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 1.1,
    },
    "log-probabilities": {**SEEDED, "logprobs": 3, "ignore_eos": True},
    "min_tokens": {**SEEDED, "min_tokens": LENGTH - 8},
    "rules": {
        **SEEDED,
        "min_tokens": LENGTH,
        "allowed_token_ids": range(60, 64),
        "bad_words": ["<<", "<=?", "b"],
    },
    "grammar": {
        **SEEDED,
        "structured_output": StructuredOutput(regex=r"[a-z]{3}(-\d\d){10,12}"),
    },
}


def answer(llm: LLM, params: SamplingParams, earlier_ids: list[int] | None = None) -> Collector:
    sink = Collector()
    llm.engine.submit("job", PROMPT, params, sink, earlier_ids=earlier_ids or [])
    sink.wait()
    return sink


def text_after(whole: Collector, num_tokens: int) -> str:
    """The text that came with the tokens after the first ``num_tokens``."""
    assert len(whole.outputs) == len(whole.token_ids)
    return "".join(output.text for output in whole.outputs[num_tokens:])


@pytest.mark.parametrize("name", ANSWERS)
def test_the_rest_is_the_same(llm: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=LENGTH, **ANSWERS[name])
    whole = answer(llm, params)
    num_tokens = len(whole.token_ids)
    assert num_tokens > 30
    for cut in (1, 20, num_tokens - 1):
        rest = answer(llm, params, whole.token_ids[:cut])
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.text == text_after(whole, cut)
        end = rest.outputs[-1]
        assert end.finish_reason is whole.outputs[-1].finish_reason
        assert end.stats is not None
        assert (end.stats.num_input_tokens, end.stats.num_output_tokens) == (
            len(PROMPT),
            num_tokens - cut,
        )
        for ours, theirs in zip(rest.outputs, whole.outputs[cut:], strict=True):
            for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_a_stop_word_is_found_across_the_break(llm: LLM) -> None:
    """Some of the breaks are inside the word."""
    params = SamplingParams(max_tokens=LENGTH, allowed_token_ids=range(60, 64), **SEEDED)
    free = answer(llm, params)
    word = free.text[20:26]
    assert len(word) == 6
    params = SamplingParams(
        max_tokens=LENGTH, allowed_token_ids=range(60, 64), stop=(word,), **SEEDED
    )
    whole = answer(llm, params)
    assert whole.outputs[-1].finish_reason is FinishReason.STOP
    num_tokens = len(whole.token_ids)
    for cut in range(1, num_tokens):
        rest = answer(llm, params, whole.token_ids[:cut])
        assert (rest.token_ids, rest.text) == (whole.token_ids[cut:], text_after(whole, cut))


def test_a_character_is_whole_across_the_break(llm: LLM) -> None:
    text = "a😀b😀c"
    wanted = StructuredOutput(choice=[text])
    params = SamplingParams(max_tokens=LENGTH, structured_output=wanted, temperature=0)
    whole = answer(llm, params)
    assert whole.text == text
    for cut in range(1, len(whole.token_ids)):
        rest = answer(llm, params, whole.token_ids[:cut])
        assert rest.text == text_after(whole, cut)


def test_it_is_counted_like_a_prompt(llm: LLM) -> None:
    counters = llm.engine.counters
    before = counters.prompt_tokens, counters.generation_tokens
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    answer(llm, params, [60, 61, 62, 63])
    assert counters.prompt_tokens - before[0] == len(PROMPT) + 4
    assert counters.generation_tokens - before[1] == 6


@pytest.mark.parametrize(
    ("earlier_ids", "options", "message"),
    [
        ([60] * 4, {"max_tokens": 4}, "output_ids_so_far: got '4 tokens'; must be fewer than"),
        ([60, 384], {}, "output_ids_so_far: got 384; token ids are 0 to 383"),
        ([-1], {}, "output_ids_so_far: got -1; token ids are 0 to 383"),
        ([60], {"prompt_logprobs": 0}, "prompt_logprobs: got 0; must be left out with"),
    ],
)
def test_what_cannot_go_on_is_refused(
    llm: LLM, earlier_ids: list[int], options: dict[str, Any], message: str
) -> None:
    params = SamplingParams(**{"max_tokens": 8, **options})
    with pytest.raises(InvalidRequestError) as refused:
        answer(llm, params, earlier_ids)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("earlier", "options", "field"),
    [
        ("ab", {"structured_output": StructuredOutput(regex=r"a\d*")}, "structured_output.regex"),
        (
            "xx",
            {"allowed_token_ids": [91], "bad_words": ["xxx"]},
            "allowed_token_ids, bad_words",
        ),
    ],
)
def test_output_that_the_rules_do_not_allow_is_its_clients_mistake(
    llm: LLM, earlier: str, options: dict[str, Any], field: str
) -> None:
    earlier_ids = llm.engine.tokenizer.encode(earlier, special_tokens=False)
    before = llm.engine.counters.refused
    end = answer(llm, SamplingParams(**options), earlier_ids).outputs[-1]
    assert end.refusal is not None
    assert end.refusal.field == field
    assert llm.engine.counters.refused == before + 1


def test_end_tokens_end_the_rest(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, temperature=HOT, seed=3)
    whole = answer(llm, params)
    assert whole.token_ids[-1] in EOS_TOKEN_IDS
    cut = len(whole.token_ids) // 2
    assert answer(llm, params, whole.token_ids[:cut]).token_ids == whole.token_ids[cut:]
