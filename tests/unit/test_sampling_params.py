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
        ("repetition_penalty", [0, -1, NAN, INF, 101]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, INF]),
        ("seed", [-1, 2**64, 1.5]),
        ("logprobs", [-1, 21]),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field}: got ")


@pytest.mark.parametrize(
    "stop",
    ["", ("",), ("x" * 257,), "x" * 257, ("a",) * 17, (3,), 3, b"END", {"a": 1}, "\ud800", [None]],
)
def test_impossible_stop_words(stop: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop=stop)
    assert caught.value.field == "stop_words"


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


def test_limits_are_inclusive() -> None:
    SamplingParams(max_tokens=2**31 - 1, min_tokens=2**31 - 1, seed=2**64 - 1, top_p=1.0)
    SamplingParams(top_k=0, temperature=0, presence_penalty=-2.0, logprobs=20)


def test_a_temperature_by_which_logits_cannot_be_divided_is_greedy() -> None:
    assert SamplingParams(temperature=1e-40).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_a_long_value_is_not_quoted_in_full() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(temperature="x" * 1000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
