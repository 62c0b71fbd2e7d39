"""The encoder agrees with transformers, and its embeddings tell kinds of tasks apart."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from fastserve_backend.errors import ConfigError
from fastserve_backend.length_prediction.encoder import (
    EMBEDDING_SIZE,
    FIRST_TOKENS,
    LAST_TOKENS,
    NUM_LAYERS,
    Encoder,
    model_directory,
)
from transformers import AutoModel, AutoTokenizer

TEXTS = [
    "Name three colours.",
    "Write a haiku about the sea",
    "Größe, naïve 东京 🙂",
    "",
    "Translate the sentence into French:\n\nThe cat is on the mat.",
]


@pytest.mark.parametrize("text", TEXTS)
def test_embeds_as_transformers_does(encoder: Encoder, text: str) -> None:
    directory = model_directory()
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModel.from_pretrained(directory, local_files_only=True)
    inputs = tokenizer(text, return_tensors="pt")
    assert encoder.token_ids(text) == inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        layers = model(**inputs, output_hidden_states=True).hidden_states
    expected = torch.nn.functional.normalize(layers[NUM_LAYERS][0].mean(0), dim=0).numpy()
    np.testing.assert_allclose(encoder.embed(text), expected, atol=1e-3)  # its weights: float16


def test_embeddings_have_unit_length_and_tell_kinds_of_task_apart(encoder: Encoder) -> None:
    poem, ode, sum_, product = (
        encoder.embed(text)
        for text in (
            "Write a poem about the sea.",
            "Write an ode to the mountains.",
            "What is 17 plus 25?",
            "What is 12 times 8?",
        )
    )
    assert poem.shape == (EMBEDDING_SIZE,)
    assert poem.dtype == np.float32
    assert np.linalg.norm(poem) == pytest.approx(1.0, abs=1e-5)
    assert poem @ ode > max(poem @ sum_, poem @ product)
    assert sum_ @ product > max(sum_ @ poem, sum_ @ ode)


def test_of_a_long_prompt_the_beginning_and_the_end_are_read(encoder: Encoder) -> None:
    words = [f"w{index}" for index in range(40)]
    whole = encoder.token_ids(" ".join(words))
    assert len(whole) == FIRST_TOKENS + LAST_TOKENS
    assert whole[: FIRST_TOKENS - 1] == encoder.token_ids(" ".join(words[:8]))[: FIRST_TOKENS - 1]
    assert whole[-LAST_TOKENS:] == encoder.token_ids(" ".join(words[-4:]))[-LAST_TOKENS:]


def test_a_megabyte_costs_no_more_than_a_page(encoder: Encoder) -> None:
    begin, end = "Summarise this text. ", " Answer in one sentence."
    assert encoder.token_ids(begin + "word " * 300_000 + end) == encoder.token_ids(
        begin + "word " * 500 + end
    )


def test_text_that_no_utf_8_can_hold_is_embedded(encoder: Encoder) -> None:
    assert np.isfinite(encoder.embed("broken \ud800 text")).all()


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fastserve-triton\[speculative\]'"):
        Encoder()
