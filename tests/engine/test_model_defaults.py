"""Answers of a model whose generation_config.json has defaults of sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.errors import InvalidRequestError
from opinionated_model import DEFAULTS, GENERATION_FILE, REFUSAL, save_opinionated_model
from tiny_model import engine_options

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_opinionated_model(tmp_path_factory.mktemp("model"), DEFAULTS)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(**engine_options(model)) as shared:
        yield shared


def tokens(llm: LLM, params: SamplingParams | None) -> list[int]:
    [completion] = llm.generate("Hello", params, progress=False)
    return completion.token_ids


def given(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, ignore_eos=True, **fields)


def test_what_is_left_out_is_the_models(llm: LLM) -> None:
    greedy = tokens(llm, given(temperature=0))
    assert tokens(llm, given()) == tokens(llm, given(seed=3)) == greedy
    assert tokens(llm, None) == greedy[: len(tokens(llm, None))]


def test_each_field_by_itself(llm: LLM) -> None:
    hot = tokens(llm, given(top_k=-1, seed=3))
    assert hot == tokens(llm, given(top_k=0, temperature=2.5, seed=3))
    assert hot != tokens(llm, given(top_k=-1, temperature=0.3, seed=3))
    assert tokens(llm, given(top_k=-1, temperature=0)) == tokens(llm, given())


def test_a_refusal_of_the_chat_template_is_the_requests_error(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert caught.value.field == "messages"
    assert str(caught.value).endswith(REFUSAL)


def test_repetition_penalty(tmp_path: Path) -> None:
    with LLM(
        **engine_options(save_opinionated_model(tmp_path, {"repetition_penalty": 2.0}))
    ) as llm:
        penalised = tokens(llm, given(temperature=0))
        assert penalised == tokens(llm, given(temperature=0, repetition_penalty=2.0))
        assert penalised != tokens(llm, given(temperature=0, repetition_penalty=1.0))


def test_switched_off(llm: LLM, model: Path) -> None:
    """A wrong value does not matter then."""
    greedy = tokens(llm, given())
    (model / GENERATION_FILE).write_text(json.dumps(DEFAULTS | {"top_p": 7}))
    with LLM(**engine_options(model), generation_config="off") as plain:
        usual = tokens(plain, given(seed=3))
        assert usual == tokens(plain, given(temperature=1, top_k=-1, seed=3))
        assert usual != greedy
        # Numbers reach the ranks as they are.
        assert tokens(plain, given(temperature=0, presence_penalty=1e-6)) == greedy
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p: got 7; must be"):
        LLM(**engine_options(model))
