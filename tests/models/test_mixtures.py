"""Mixtures of experts: their configurations, and the forms in which checkpoints store experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import MIXTURES
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.mxfp4 import mxfp4_weight
from fastserve_kernels.weight_quantization import quantize_groups, rounded
from paged_executor import PagedExecutor, check_chunked_prompts, check_prompt, load, prompts
from rank_threads import DividedModel
from rotary_checkpoints import random_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def saved(name: str, directory: Path, **changes: Any) -> PreTrainedModel:
    theirs = random_model(MIXTURES[name].config(**changes))
    theirs.save_pretrained(directory)
    return theirs


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("olmoe-1b-7b", 6.9, 1.3),
        # OpenAI leaves out the input table, which has 0.58 billion.
        ("gpt-oss-20b", 20.9, 3.6 + 0.58),
        ("gpt-oss-120b", 116.8, 5.1 + 0.58),
    ],
)
def test_published_sizes(name: str, billions: float, active: float) -> None:
    config = load_model_config(name, load_format="dummy")
    assert config.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert config.num_active_parameters / 1e9 == pytest.approx(active, abs=0.06)
    tables = (1 if config.tie_word_embeddings else 2) * config.num_head_parameters
    of_layers = config.num_layers * config.num_active_layer_parameters
    assert of_layers == pytest.approx(config.num_active_parameters - tables, rel=1e-3)


def test_a_larger_batch_reads_more_experts() -> None:
    config = load_model_config("olmoe-1b-7b", load_format="dummy")
    shares = [config.share_of_experts_read(tokens) for tokens in (0, 1, 2, 64)]
    assert shares == pytest.approx([0, 8 / 64, 1 - (56 / 64) ** 2, 1.0], abs=1e-3)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3_moe"])
def test_all_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    """As transformers 5 has them in memory."""
    theirs = saved(name, tmp_path)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    assert any(
        ".mlp.experts.gate_up_proj" in one for one in load_file(tmp_path / "model.safetensors")
    )
    check_prompt(load(tmp_path), theirs)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor [experts, columns, rows] in MXFP4: blocks, scales, and what they stand for."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().sub(2)
    values = torch.tensor([*FP4, *(-one for one in FP4)])
    steps = groups / exponents.exp2()[..., None]
    codes = (steps[..., None] - values).abs().argmin(-1)
    low, high = codes[..., 0::2], codes[..., 1::2]
    exact = (values[codes] * exponents.exp2()[..., None]).flatten(2).transpose(1, 2)
    return (low + 16 * high).byte(), (exponents + 127).byte(), exact


def save_in_mxfp4(theirs: PreTrainedModel, directory: Path) -> None:
    """Rounds the experts of a saved gpt-oss model, in memory and in its files."""
    tensors = load_file(directory / "model.safetensors")
    parameters = dict(theirs.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, exact = mxfp4(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            parameters[name].copy_(exact)
    save_file(tensors, directory / "model.safetensors")
    change_config(directory, quantization_config={"quant_method": "mxfp4"})


MULTIPLES_OF_32 = {"hidden_size": 64, "intermediate_size": 32}


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(1, 1), (2, 2)])
def test_mxfp4(tensor_size: int, num_stages: int, tmp_path: Path) -> None:
    theirs = saved("gpt_oss", tmp_path, **MULTIPLES_OF_32)
    save_in_mxfp4(theirs, tmp_path)
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    assert config.quantization == "as_stored"
    check_chunked_prompts(DividedModel(config, tensor_size, num_stages), theirs)  # type: ignore[arg-type]


def test_every_number_of_mxfp4() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(1, 16)
    values = mxfp4_weight(blocks, scales).dequantized(torch.bfloat16).view(16, 16, 2)
    numbers = FP4 + [-one for one in FP4]
    for byte in range(256):
        group, place = divmod(byte, 16)
        scale = 2.0 ** (120 + group - 127)
        expected = [numbers[byte % 16] * scale, numbers[byte // 16] * scale]
        assert values[group, place].tolist() == expected


def test_mxfp4_is_refused_by_name_where_it_is_half_there(tmp_path: Path) -> None:
    save_in_mxfp4(saved("gpt_oss", tmp_path, **MULTIPLES_OF_32), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks is unexpected"
    ):
        load(tmp_path)


def test_other_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    for name, method in (("gpt_oss", "quark"), ("mixtral", "mxfp4")):
        saved(name, tmp_path)
        change_config(tmp_path, quantization_config={"quant_method": method})
        with pytest.raises(ModelError, match=r"expected awq, .* or mxfp4 of gpt_oss"):
            load(tmp_path)


def with_rounded_weights(
    model: PreTrainedModel, *, is_fused: bool, rounded: Callable[[Tensor], Tensor] = rounded
) -> PreTrainedModel:
    """Rounds linear layers and experts, but not routers, to INT8 or otherwise."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(rounded(layer.weight.detach()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                for expert in parameter:
                    rows = expert.T if is_fused else expert
                    rows.copy_(rounded(rows))
    return model


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(("tensor_size", "num_stages"), [(1, 1), (2, 2)])
def test_int8(name: str, tensor_size: int, num_stages: int, tmp_path: Path) -> None:
    theirs = with_rounded_weights(
        saved(name, tmp_path, num_key_value_heads=4), is_fused=name == "gpt_oss"
    )
    config = load_model_config(
        str(tmp_path), load_format="auto", dtype="float32", quantization="int8"
    )
    check_chunked_prompts(DividedModel(config, tensor_size, num_stages), theirs)  # type: ignore[arg-type]


def in_int4(weight: Tensor) -> Tensor:
    group = next(one for one in (64, 32, 16) if weight.shape[1] % one == 0)
    return quantize_groups(weight, bits=4, group=group).dequantized(torch.float32)


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_int4(name: str, tmp_path: Path) -> None:
    theirs = with_rounded_weights(
        saved(name, tmp_path), is_fused=name == "gpt_oss", rounded=in_int4
    )
    config = load_model_config(
        str(tmp_path), load_format="auto", dtype="float32", quantization="int4"
    )
    check_chunked_prompts(load_model(config, torch.device("cpu")), theirs)


def test_more_ranks_than_experts(tmp_path: Path) -> None:
    theirs = saved("mixtral_windows", tmp_path, num_key_value_heads=4)
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    assert config.experts.count == 3
    check_prompt(DividedModel(config, 4, 1), theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
def test_random_weights_do_not_depend_on_the_division(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    config = load_model_config(str(tmp_path), load_format="dummy", dtype="float32")
    logits = []
    for model in (load_model(config, torch.device("cpu")), DividedModel(config, 2, 1)):
        executor = PagedExecutor(model, theirs.config, prompts(9), seed=5)  # type: ignore[arg-type]
        executor.step([(0, 9)])
        logits.append(torch.stack(executor.jobs[0].logits))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)


def test_an_expert_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    saved("olmoe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks layers\.1\.mlp\.experts\.4\.up_proj\.weight"):
        load(tmp_path)


def test_a_token_cannot_choose_more_experts_than_there_are(tmp_path: Path) -> None:
    saved("olmoe", tmp_path)
    change_config(tmp_path, num_experts_per_tok=7)
    with pytest.raises(ModelError, match="num_experts_per_tok is 7, expected at most the 6 exp"):
        load(tmp_path)
