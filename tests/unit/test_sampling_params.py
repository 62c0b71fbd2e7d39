"""Ranges of a request's sampling fields."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 2**31, 1.5, "3", True, None]),
        ("min_tokens", [-1, 17, True]),
        ("temperature", [-0.1, NAN, INF, "hot", 1000]),
        ("top_p", [0, -1, 1.1, NAN]),
        ("top_k", [-2, 2**31, 0.5]),
        ("min_p", [-0.1, 1.1, NAN, "0.5", True]),
        ("repetition_penalty", [0, -1, NAN, INF, 101]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, INF]),
        ("seed", [-1, 2**64, 1.5]),
        ("logprobs", [-1, 21]),
        ("skip_special_tokens", [0, "false", None]),
        (
            "allowed_token_ids",
            [[], (), -1, [2**31], [True], ["7"], "7", b"7", [None], {7: 1}, range(16385)],
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field}: got ")


@pytest.mark.parametrize(("field", "most"), [("stop_words", 16), ("bad_words", 64)])
@pytest.mark.parametrize(
    "words",
    ["", ("",), ("x" * 257,), "x" * 257, (3,), 3, b"END", {"a": 1}, "\ud800", [None], "many"],
)
def test_impossible_words(field: str, most: int, words: Any) -> None:
    words = ("a",) * (most + 1) if words == "many" else words
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{"stop" if field == "stop_words" else field: words})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("stop", "words"),
    [("END", ("END",)), (["END", "x"], ("END", "x")), (("\n",), ("\n",)), (None, ()), ([], ())],
)
def test_one_text_is_one_stop_word(stop: Any, words: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == words


@pytest.mark.parametrize(
    ("token_ids", "kept"), [(7, {7}), ([7, 0, 7], {0, 7}), ({7}, {7}), (None, set()), ((), set())]
)
def test_one_number_is_one_stop_token(token_ids: Any, kept: set[int]) -> None:
    assert SamplingParams(stop_token_ids=token_ids).stop_token_ids == kept


@pytest.mark.parametrize(
    "token_ids", [-1, [2**31], [True], True, ["7"], "7", b"7", 7.0, [None], {7: 1}, range(129)]
)
def test_impossible_stop_tokens(token_ids: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop_token_ids=token_ids)
    assert caught.value.field == "stop_token_ids"


def test_allowed_tokens_are_a_set() -> None:
    assert SamplingParams().allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=7).allowed_token_ids == {7}
    many = SamplingParams(allowed_token_ids=range(16384))
    assert len(many.allowed_token_ids or ()) == 16384
    assert many.with_model_defaults({}).allowed_token_ids == many.allowed_token_ids


def test_limits_are_inclusive() -> None:
    SamplingParams(min_p=0, bad_words=("a" * 256,) * 64)
    SamplingParams(min_p=1, bad_words=None)
    SamplingParams(max_tokens=2**31 - 1, min_tokens=2**31 - 1, seed=2**64 - 1, top_p=1.0)
    SamplingParams(top_k=0, temperature=0, presence_penalty=-2.0, logprobs=20)


def test_a_temperature_by_which_logits_cannot_be_divided_is_greedy() -> None:
    assert SamplingParams(temperature=1e-40).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_a_long_value_is_not_quoted_in_full() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(temperature="x" * 1000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
