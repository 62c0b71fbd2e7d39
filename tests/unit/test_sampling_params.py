"""Ranges of the request's fields."""

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


@pytest.mark.parametrize("stop", [("",), ("x" * 257,), ("a",) * 17, (3,)])
def test_impossible_stop_words(stop: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop=stop)
    assert caught.value.field == "stop_words"


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
