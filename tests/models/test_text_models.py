"""Of a model that also reads images, the text model is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import ALTERNATING, HEAD_DIM, SIZES, WINDOWED
from fastserve_backend.checkpoints.load_config import load_model_config
from paged_executor import check_prompt, load
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Mistral3Config,
    MistralConfig,
    PreTrainedConfig,
)

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = SIZES | HEAD_DIM | WINDOWED
MODELS: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT, **ALTERNATING).to_dict(),
        vision_config=VISION,
        mm_tokens_per_image=1,
        image_token_index=300,
    ),
    "mistral3": Mistral3Config(
        text_config=MistralConfig(**TEXT).to_dict(),
        vision_config=VISION | {"model_type": "pixtral"},
        image_token_index=300,
        tie_word_embeddings=False,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_its_text_has_the_logits_of_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    theirs = AutoModelForImageTextToText.from_config(MODELS[name]).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    with caplog.at_level("WARNING"):
        check_prompt(load(tmp_path), theirs, 40)
    assert "only its text model is served" in caplog.text
    config = load_model_config(str(tmp_path), load_format="auto")
    assert config.tie_word_embeddings == (name == "gemma3")
