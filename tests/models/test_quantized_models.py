"""Models whose linear layers are rounded to INT8, against transformers with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from divisible_models import saved
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.models.loader import load_model
from fastserve_kernels.weight_quantization import rounded
from paged_executor import check_chunked_prompts
from rank_threads import DividedModel
from torch import nn
from transformers import PreTrainedModel

MODELS = ["opt_base", "opt_350m", "llama_grouped", "llama_biases", "neox_tied"]


def with_rounded_linears(model: PreTrainedModel) -> PreTrainedModel:
    """Rounds the weights of linear layers to INT8; a tied head gets weights of its own."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(rounded(layer.weight.detach()))
    return model


def rounded_model(name: str, directory: Path) -> tuple[ModelConfig, PreTrainedModel]:
    """A saved checkpoint's configuration in INT8, and transformers' model of that precision."""
    theirs = with_rounded_linears(saved(name, directory))
    config = load_model_config(
        str(directory), load_format="auto", dtype="float32", quantization="int8"
    )
    return config, theirs


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    config, theirs = rounded_model(name, tmp_path)
    check_chunked_prompts(load_model(config, torch.device("cpu")), theirs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tensor_size", "num_stages"), [(2, 1), (2, 2)])
def test_ranks_round_as_one_does(
    name: str, tensor_size: int, num_stages: int, tmp_path: Path
) -> None:
    """This includes ranks with part of a row, whose largest number another rank may have."""
    config, theirs = rounded_model(name, tmp_path)
    check_chunked_prompts(DividedModel(config, tensor_size, num_stages), theirs)  # type: ignore[arg-type]
