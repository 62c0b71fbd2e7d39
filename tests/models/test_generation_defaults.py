"""generation_config.json gives a model's own defaults of sampling."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.generation_defaults import load_generation_defaults
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.sampling_params import MODEL_DEFAULTS, SamplingParams
from log_records import messages_of
from tiny_model import TINY_OPT
from tokenizer_files import write_json

QWEN = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.05,
    "eos_token_id": [7, 8],
    "pad_token_id": 7,
    "transformers_version": "4.45.0",
}
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def defaults(directory: Path, fields: dict[str, Any] | None) -> dict[str, float]:
    write_json(directory, "config.json", TINY_OPT)
    if fields is not None:
        write_json(directory, "generation_config.json", fields)
    return load_generation_defaults(load_model_config(str(directory), load_format="dummy"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (QWEN, {name: QWEN[name] for name in MODEL_DEFAULTS}),
        ({"min_p": 0.0, "top_p": None}, {"min_p": 0.0}),
        ({}, {}),
        (None, {}),
        ({"do_sample": True}, {}),
        # Fields count whatever do_sample says.
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": 1, "top_k": 0}, {"temperature": 1, "top_k": 0}),
        ({"top_k": -1, "temperature": 0}, {"top_k": -1, "temperature": 0}),
        ({"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None}, {}),
        ({"max_new_tokens": 5, "presence_penalty": 1.5, "seed": 3}, {}),
    ],
)
def test_fields_that_are_there(
    tmp_path: Path, fields: dict[str, Any] | None, expected: dict[str, float]
) -> None:
    assert defaults(tmp_path, fields) == expected


def test_a_built_in_model_has_none() -> None:
    assert load_generation_defaults(load_model_config("opt-125m", load_format="dummy")) == {}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_p", 7, "got 7; must be a finite number, 0 to 1"),
        ("top_p", 0, "got 0; must be above 0 and at most 1"),
        ("temperature", "hot", "got 'hot'; must be a finite number, 0 to 100"),
        ("temperature", -1, "got -1; must be a finite number, 0 to 100"),
        ("temperature", True, "got True; must be a finite number, 0 to 100"),
        ("temperature", float("nan"), "got nan; must be a finite number, 0 to 100"),
        ("top_k", -2, "got -2; must be an integer, -1 to 2147483647"),
        ("top_k", 20.5, "got 20.5; must be an integer, -1 to 2147483647"),
        ("top_k", [20], "got [20]; must be an integer, -1 to 2147483647"),
        ("min_p", 1.5, "got 1.5; must be a finite number, 0 to 1"),
        ("repetition_penalty", 0, "got 0; must be a finite number, 0.01 to 100"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        defaults(tmp_path, {field: value})
    file = tmp_path / "generation_config.json"
    remedy = "correct it, or set generation_config to off"
    assert str(caught.value) == f"{file}: {field}: {message}; {remedy}"


def test_they_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        defaults(tmp_path, QWEN)
    named = "temperature 0.7, top_p 0.8, top_k 20, min_p 0.05, repetition_penalty 1.05"
    messages = messages_of(caplog, "fastserve_backend.checkpoints")
    assert messages == [f"defaults from generation_config.json: {named}"]


class TestOfOneJob:
    MODEL = MappingProxyType({field: QWEN[field] for field in MODEL_DEFAULTS})

    def sampling(self, params: SamplingParams) -> dict[str, float]:
        chosen = params.with_model_defaults(self.MODEL)
        return {name: getattr(chosen, name) for name in MODEL_DEFAULTS}

    def test_all_that_is_left_out(self) -> None:
        assert self.sampling(SamplingParams(max_tokens=3, presence_penalty=1.0)) == self.MODEL

    @pytest.mark.parametrize("field", MODEL_DEFAULTS)
    def test_a_given_field_beats_the_models(self, field: str) -> None:
        """Even if it is the usual default."""
        given = {field: USUAL[field]}
        assert self.sampling(SamplingParams(**given)) == self.MODEL | given

    def test_a_changed_copy_still_has_them(self) -> None:
        params = replace(SamplingParams(temperature=0.1), max_tokens=3)
        assert self.sampling(params) == self.MODEL | {"temperature": 0.1}

    def test_without_defaults_the_numbers_are_plain(self) -> None:
        """Messages to the ranks take no others."""
        params = SamplingParams().with_model_defaults({})
        assert {name: getattr(params, name) for name in MODEL_DEFAULTS} == USUAL
        assert {type(getattr(params, name)) for name in MODEL_DEFAULTS} == {float, int}

    def test_temperature_0_is_greedy_whatever_else_the_model_has(self) -> None:
        assert SamplingParams(temperature=0).with_model_defaults(self.MODEL).greedy
        assert not SamplingParams().with_model_defaults(self.MODEL).greedy
        assert SamplingParams().with_model_defaults({"top_k": 1}).greedy
