"""Allowed tokens, bad words, min_p, special tokens and truncated prompts with real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend import LLM, SamplingParams, StructuredOutput
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import FinishReason
from small_model import EOS_TOKEN_IDS, MAX_MODEL_LEN

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPT = [10, 50, 90, 130, 170]
HOT = 4.0  # flattens the small model's sharp distributions
FREE = SamplingParams(max_tokens=60, temperature=HOT, ignore_eos=True, seed=1)


def id_of(llm: LLM, letter: str) -> int:
    [token_id] = llm.engine.tokenizer.encode(letter, special_tokens=False)
    return token_id


def test_only_allowed_tokens_are_chosen_beside_free_jobs(llm: LLM) -> None:
    allowed = {60, 61, 62, EOS_TOKEN_IDS[0]}
    options: dict[str, Any] = {"max_tokens": 50, "allowed_token_ids": allowed}
    params = [
        SamplingParams(temperature=0, **options),
        *(SamplingParams(temperature=HOT, seed=seed, **options) for seed in range(4)),
        SamplingParams(temperature=HOT, seed=3, min_tokens=50, **options),
        SamplingParams(logit_bias={7: 100.0, 61: 100.0}, ignore_eos=True, **options),
        FREE,
    ]
    answers = llm.generate([PROMPT] * len(params), params, progress=False)
    for answer in answers[:-1]:
        assert set(answer.token_ids) <= allowed
    assert {answer.finish_reason for answer in answers[1:5]} == {FinishReason.STOP}
    assert answers[5].finish_reason is FinishReason.LENGTH
    assert answers[6].token_ids == [61] * 50
    (alone,) = llm.generate([PROMPT], FREE, progress=False)
    assert answers[-1].token_ids == alone.token_ids


def test_bad_words_are_in_no_answer(llm: LLM) -> None:
    """The tokens are bytes, so a word can be spelled in one way only."""
    options: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True, "seed": 1}
    allowed = [id_of(llm, letter) for letter in "abc "]
    words = ["abc", "cb", " a", "bb", "c"]
    params = [
        SamplingParams(
            allowed_token_ids=allowed, temperature=temperature, bad_words=words[:count], **options
        )
        for temperature in (0.0, 100.0)
        for count in range(len(words) + 1)
    ]
    (letters,) = llm.generate([PROMPT], params[len(words) + 1], progress=False)
    assert all(word in letters.text for word in words)
    answers = llm.generate([PROMPT] * len(params), params, progress=False)
    for answer, one in zip(answers, params, strict=True):
        assert len(answer.token_ids) == 250
        assert not any(word.lstrip(" ") in answer.text for word in one.bad_words)


def test_min_p_of_1_is_greedy_and_one_of_0_changes_nothing(llm: LLM) -> None:
    def tokens(**options: Any) -> list[int]:
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=5, **options)
        (answer,) = llm.generate([PROMPT], params, progress=False)
        return answer.token_ids

    assert tokens(temperature=HOT, min_p=1.0) == tokens(temperature=0)
    assert tokens(temperature=HOT, min_p=0.0) == tokens(temperature=HOT)
    assert tokens(temperature=HOT, min_p=0.3) != tokens(temperature=HOT)


def test_rules_and_a_grammar_hold_together(llm: LLM) -> None:
    wanted = StructuredOutput(regex="[ab]{6}")
    a, b, end = id_of(llm, "a"), id_of(llm, "b"), EOS_TOKEN_IDS[3]

    def text(**options: Any) -> str:
        params = SamplingParams(temperature=HOT, seed=2, structured_output=wanted, **options)
        (answer,) = llm.generate([PROMPT], params, progress=False)
        return answer.text

    assert text(allowed_token_ids=[b, end]) == "bbbbbb"
    assert text(bad_words=["a"]) == "bbbbbb"
    assert text(bad_words=["aa", "bb"]) in ("ababab", "bababa")
    assert text(allowed_token_ids=[a, b, end], bad_words=["ab", "bb"], logit_bias={b: 99.0}) == (
        "baaaaa"
    )
    message = (
        "^allowed_token_ids, bad_words, structured_output: got '3 tokens'; together they allow no"
    )
    with pytest.raises(InvalidRequestError, match=message):
        text(allowed_token_ids=[a, end], bad_words=["aaaa"])


def test_special_tokens_have_text_on_request(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "logit_bias": {0: 100.0}}
    answers = llm.generate(
        [PROMPT] * 4,
        [
            SamplingParams(**options),
            SamplingParams(skip_special_tokens=False, **options),
            SamplingParams(skip_special_tokens=False, stop_token_ids=[0], **options),
            SamplingParams(skip_special_tokens=False, stop="><s", **options),
        ],
        progress=False,
    )
    assert [answer.text for answer in answers] == ["", "<s>" * 4, "", "<s"]


def test_a_truncated_prompt_is_its_end(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    long = [5 + n % 90 for n in range(2 * MAX_MODEL_LEN)]
    answers = [
        *llm.generate([long], params, truncate_prompt_tokens=7, progress=False),
        *llm.generate([long[-7:]], params, progress=False),
        *llm.generate(["a" * 5000], params, truncate_prompt_tokens=-1, progress=False),
        *llm.generate(["a" * (MAX_MODEL_LEN - 5)], params, progress=False),
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[2].token_ids == answers[3].token_ids
    assert [one.stats and one.stats.num_input_tokens for one in answers] == [7, 7, 315, 315]
