"""The forms of answers that requests may ask for, and which fields exclude each other."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend import SamplingParams, StructuredOutput
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer
from fastserve_backend.engine.request_checks import RequestChecks
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.grammars.structured_output import MAX_TEXT_BYTES

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"json_schema": SCHEMA}, '"größe"'),
        ({"json_object": True}, "object"),
        ({"regex": r"\d+"}, r"\d+"),
        ({"choice": ["a", "ä"]}, '["a", "ä"]'),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
        ({"choice": "ab"}, '["ab"]'),
        ({"choice": ("a",), "regex": None}, '["a"]'),
    ],
)
def test_each_kind(value: dict[str, Any], text: str) -> None:
    wanted = StructuredOutput.of(value)
    assert value[wanted.kind]
    assert text in wanted.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("json", "structured_output: got 'json'; must be a JSON object with one of json_schema"),
        ({}, "structured_output: got 'none'; must have exactly one of json_schema"),
        ({"json_object": True, "regex": "a"}, "got 'json_object and regex'; must have exactly"),
        ({"json": {}}, "structured_output: got 'json'; unknown"),
        ({"json_object": False}, "structured_output.json_object: got False; must be true"),
        ({"json_object": 1}, "structured_output.json_object: got 1; must be true"),
        ({"json_schema": []}, "structured_output.json_schema: got \\[\\]; must be a JSON object"),
        ({"json_schema": {"enum": [float("nan")]}}, "must be valid JSON"),
        ({"json_schema": {"enum": [{1}]}}, "must be valid JSON"),
        ({"json_schema": {"title": "\ud800"}}, "must be valid Unicode"),
        ({"json_schema": {"title": "a" * MAX_TEXT_BYTES}}, "at most 65536 bytes"),
        ({"regex": ""}, "structured_output.regex: got ''; must be a text"),
        ({"regex": 5}, "structured_output.regex: got 5; must be a text"),
        ({"regex": "\ud800"}, "must be valid Unicode"),
        ({"choice": []}, "structured_output.choice: got \\[\\]; must be a list"),
        ({"choice": ""}, "structured_output.choice: got ''; each choice is a text"),
        ({"choice": 5}, "structured_output.choice: got 5; must be a list"),
        ({"choice": ["a", ""]}, "structured_output.choice: got ''; each choice is a text"),
        ({"choice": ["a", 5]}, "got 5; each choice is a text"),
        ({"grammar": ["a"]}, "structured_output.grammar: got"),
    ],
)
def test_what_is_refused_at_once(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutput.of(value)


def test_it_ends_with_an_end_of_sequence_token() -> None:
    wanted = StructuredOutput(choice=["a"])
    for options in ({"ignore_eos": True}, {"min_tokens": 1}):
        with pytest.raises(InvalidRequestError, match=f"{next(iter(options))}: got "):
            SamplingParams(structured_output=wanted, **options)
    SamplingParams(structured_output=wanted, stop=("b",), logprobs=2, presence_penalty=1.0)


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        (dict.fromkeys(range(301), 1.0), "logit_bias: got '301 tokens'; at most 300"),
        ({-1: 1.0}, "logit_bias: got -1; must be an integer, a token id"),
        ({5: 100.5}, r"logit_bias\[5\]: got 100.5; must be a finite number, -100 to 100"),
        ({5: float("nan")}, r"logit_bias\[5\]: got nan"),
    ],
)
def test_biases_out_of_their_range(biases: dict[int, float], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(logit_bias=biases)


def test_what_the_model_has_not_cannot_be_asked_for() -> None:
    without_end = load_model_config("opt-125m", load_format="dummy")
    object.__setattr__(without_end, "eos_token_ids", ())
    tokenizer = ByteTokenizer(without_end.vocab_size)
    checks = RequestChecks(without_end, tokenizer, lambda: 1000)
    with pytest.raises(
        InvalidRequestError, match="logit_bias: got 50272; token ids are 0 to 50271"
    ):
        checks.validate([5], SamplingParams(logit_bias={50271: 1.0, 50272: 1.0}))
    with pytest.raises(
        InvalidRequestError, match="stop_token_ids: got 50272; token ids are 0 to 50271"
    ):
        checks.validate([5], SamplingParams(stop_token_ids=[50271, 50272]))
    with pytest.raises(
        InvalidRequestError, match="structured_output: got 'regex'; the model has no"
    ):
        checks.validate([5], SamplingParams(structured_output=StructuredOutput(regex="a")))
