"""Models whose linear layers are rounded to INT4, against transformers with the same weights."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from divisible_models import ROTARY, saved
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.models.loader import load_model
from fastserve_kernels.weight_quantization import quantize_groups
from paged_executor import check_chunked_prompts, check_prompt
from quantized_checkpoints import FORMATS, save_quantized
from rank_threads import DividedModel
from rotary_checkpoints import LLAMA, random_model
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

MODELS = ["opt_base", "opt_350m", "llama_grouped", "llama_biases", "neox_tied"]


ROW_LINEARS = ("o_proj", "down_proj", "attention.dense", "dense_4h_to_h")


def with_rounded_linears(model: PreTrainedModel, num_ranks: int = 1) -> PreTrainedModel:
    """A tied head gets weights of its own. Ranks divide columns between groups."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach()
            size = weight.shape[1] // (num_ranks if name.endswith(ROW_LINEARS) else 1)
            group = next(one for one in (64, 32, 16) if size % one == 0)
            rounded = quantize_groups(weight, bits=4, group=group)
            layer.weight = nn.Parameter(rounded.dequantized(torch.float32))
    return model


def int4_config(directory: Path) -> ModelConfig:
    return load_model_config(
        str(directory), load_format="auto", dtype="float32", quantization="int4"
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    theirs = with_rounded_linears(saved(name, tmp_path))
    check_chunked_prompts(load_model(int4_config(tmp_path), torch.device("cpu")), theirs)


@pytest.mark.parametrize("name", ["llama_grouped", "neox_tied"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks(name: str, num_stages: int, tmp_path: Path) -> None:
    ffn = {"intermediate_size": 96}
    theirs = random_model(type(ROTARY[name])(**ROTARY[name].to_dict() | ffn))
    theirs.save_pretrained(tmp_path)
    with_rounded_linears(theirs, 2)
    check_prompt(DividedModel(int4_config(tmp_path), 2, num_stages), theirs)  # type: ignore[arg-type]


def test_a_quantized_checkpoint_is_rounded_again(tmp_path: Path) -> None:
    wide: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
    theirs = random_model(LlamaConfig(**LLAMA | wide))
    save_quantized(theirs, tmp_path, FORMATS["gptq_8_64_act_order"])
    model = load_model(int4_config(tmp_path), torch.device("cpu"))
    check_prompt(model, with_rounded_linears(theirs))


def test_the_error_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved("llama_grouped", tmp_path)
    with caplog.at_level(logging.INFO, logger="fastserve_backend.models.loader"):
        load_model(int4_config(tmp_path), torch.device("cpu"))
    (error,) = re.findall(r"of this rank's linear layers by ([0-9.]+)% of", caplog.text)
    assert 4 < float(error) < 12  # of normal numbers in groups of 64: about 8


@pytest.mark.parametrize(
    ("name", "num_ranks", "message"),
    [
        ("llama_uneven", 1, "columns 0 to 83 of down_proj"),
        ("llama_grouped", 2, "columns (0 to 40|40 to 80) of down_proj"),
    ],
)
def test_widths_that_groups_do_not_divide_are_refused(
    name: str, num_ranks: int, message: str, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    with pytest.raises(ModelError, match=rf"which do not fit {message}; use quantization int8"):
        DividedModel(int4_config(tmp_path), num_ranks, 1)
