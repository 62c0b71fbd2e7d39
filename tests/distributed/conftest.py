"""Small random checkpoints of each architecture, with transformers' models to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from byte_tokenizer import save_byte_tokenizer
from parallel_models import MODELS
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="session")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Weights wide enough apart that rounding never decides a greedy token."""
    made = {}
    for name, config in MODELS.items():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                is_norm = "norm" in parameter_name and parameter_name.endswith("weight")
                # Strong positions, so that greedy answers do not settle on one token.
                spread = 0.8 if "embed_positions" in parameter_name else 0.4
                parameter.normal_(1.0 if is_norm else 0.0, spread)
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        made[name] = (directory, model)
    return made


@pytest.fixture(scope="session")
def small_opt(checkpoints: dict[str, tuple[Path, PreTrainedModel]]) -> Path:
    return checkpoints["opt"][0]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
