"""Of a model that also reads images, the text model is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decoder_checkpoints import SIZES
from fastserve_backend.checkpoints.load_config import load_model_config
from paged_executor import check_prompt, load
from transformers import AutoModelForImageTextToText, Qwen2VLConfig
from vision_checkpoints import QWEN_VISION, WITH_IMAGES


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_its_text_has_the_logits_of_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    theirs = AutoModelForImageTextToText.from_config(WITH_IMAGES[name]).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    with caplog.at_level("WARNING"):
        check_prompt(load(tmp_path), theirs, 40)
    assert "only its text model is served" in caplog.text
    config = load_model_config(str(tmp_path), load_format="auto")
    assert config.tie_word_embeddings == WITH_IMAGES[name].tie_word_embeddings


def test_the_fields_of_its_text_may_be_those_of_the_whole_model(tmp_path: Path) -> None:
    """As in the files of Qwen 2 VL and 2.5 VL, whose scaling has a name of its own."""
    fields = SIZES | {"model_type": "qwen2_vl", "vision_config": QWEN_VISION, "rope_theta": 1e6}
    fields["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    config = load_model_config(str(tmp_path), load_format="dummy")
    text = Qwen2VLConfig(**fields).get_text_config()
    assert config.num_layers == text.num_hidden_layers == 3
    assert config.rotaries[0].frequencies[1] == pytest.approx(
        text.rope_parameters["rope_theta"] ** -0.25
    )
    assert not config.tie_word_embeddings
