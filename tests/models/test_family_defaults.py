"""What a config.json leaves out is what transformers' configuration class has for it. A wrong
default would give wrong tokens without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastserve_backend.checkpoints.architectures import ARCHITECTURES
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import ModelConfig
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

STATED: list[dict[str, Any]] = [
    {},
    {"hidden_size": 512, "num_attention_heads": 32, "num_hidden_layers": 6},
    {"num_hidden_layers": 7, "num_key_value_heads": None},
    {"num_hidden_layers": 5, "tie_word_embeddings": True},
    {"sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
    {"head_dim": 64},
    {"rope_parameters": {"rope_type": "default"}},
]

REQUIRED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1},
    "glm4_moe": {"head_dim": 128},
}
"""Fields without a default, or whose defaults fit no kernel."""


def read(model_type: str, fields: dict[str, Any]) -> ModelConfig | None:
    """None: refused."""
    try:
        return ARCHITECTURES[model_type].read(
            HFConfig({**fields, "model_type": model_type}, "config.json"),
            name="model",
            directory=None,
            load_format="dummy",
            dtype="float32",
            quantization=None,
            kv_dtype="same",
        )
    except ModelError:
        return None


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_field_has_the_default_of_transformers(model_type: str) -> None:
    num_read = 0
    for stated in STATED:
        fields = stated | REQUIRED.get(model_type, {})
        try:
            whole = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(fields))).to_dict()
        except (
            StrictDataclassError,
            ZeroDivisionError,
            AttributeError,
        ):  # transformers refuses these fields
            continue
        config = read(model_type, fields)
        assert config == read(model_type, whole), fields
        num_read += config is not None
    assert num_read >= 5
