"""Models with quantized linear layers, against transformers with the same dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import FAMILIES, SIZES
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.loader import load_model
from fastserve_kernels import ops
from fastserve_kernels.weight_quantization import rounded
from paged_executor import check_chunked_prompts, check_prompt, load
from quantized_checkpoints import FORMATS, Format, change_config, save_quantized
from rank_threads import DividedModel
from rotary_checkpoints import NEOX, random_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPTNeoXConfig, LlamaConfig, PreTrainedModel

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
LLAMA = LlamaConfig(**SIZES | WIDE)
# Products that the checkpoint has fused; a rotation for which rows of q and k are reordered;
# biases; a fused product whose rows are reordered head by head.
OTHERS: dict[str, Any] = {
    "phi3": FAMILIES["phi3"].config(**WIDE),
    "ernie4_5": FAMILIES["ernie4_5"].config(**WIDE),
    "starcoder2": FAMILIES["starcoder2"].config(**WIDE),
    "neox": GPTNeoXConfig(**NEOX | WIDE),
}
SOME = ["awq_64", "gptq_4_32_act_order", "packed_8_128_asymmetric", "int8_channels", "fp8_blocks"]


def saved(
    config: Any, directory: Path, form: Format, skipped: tuple[str, ...] = ("lm_head",)
) -> PreTrainedModel:
    theirs = random_model(config)
    save_quantized(theirs, directory, form, skipped=skipped)
    return theirs


@pytest.mark.parametrize(
    "name",
    # `test_quantized_tensors` reads layers in all of them.
    [pytest.param(one, marks=() if one in SOME else pytest.mark.repeated) for one in FORMATS],
)
def test_logits(name: str, tmp_path: Path) -> None:
    theirs = saved(LLAMA, tmp_path, FORMATS[name])
    check_chunked_prompts(load(tmp_path), theirs)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("model", OTHERS)
def test_families(model: str, name: str, tmp_path: Path) -> None:
    theirs = saved(OTHERS[model], tmp_path, FORMATS[name], ("lm_head", "embed_out"))
    check_prompt(load(tmp_path), theirs)


def test_weights_stay_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    class Recorded(ops.QuantizedLinear):
        def __init__(self, weights: Any, *args: Any, **options: Any) -> None:
            kept.extend(weights)
            super().__init__(weights, *args, **options)

    monkeypatch.setattr(ops, "QuantizedLinear", Recorded)
    theirs = saved(LLAMA, tmp_path, FORMATS["gptq_4_32_act_order"], ())  # the head, too
    check_prompt(load(tmp_path), theirs)
    assert len(kept) == 3 * 7 + 1
    assert all(weight.bits == 4 and weight.order is None for weight in kept)


@pytest.mark.parametrize("name", [*SOME, "gptq_8_-1", "packed_act_order", "float_block"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks(name: str, num_stages: int, tmp_path: Path) -> None:
    theirs = saved(LLAMA, tmp_path, FORMATS[name])
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    check_prompt(DividedModel(config, 2, num_stages), theirs)  # type: ignore[arg-type]


def test_a_rank_says_once_that_it_widens_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(LLAMA, tmp_path, FORMATS["gptq_4_32_act_order"])
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    DividedModel(config, 2, 1)
    messages = [one.getMessage() for one in caplog.records]
    assert [one.partition(" in ")[2].partition(",")[0] for one in messages] == 2 * [
        "model.layers.0.mlp.down_proj"
    ]
    assert all("and 2 more, as in all checkpoints with desc_act" in one for one in messages)


def test_stacked_layers_with_different_orders(tmp_path: Path) -> None:
    """Their columns cannot be permuted for all at once."""
    theirs = random_model(LLAMA)
    forms = {
        name: replace(FORMATS["gptq_4_32_act_order"], act_order=seed)
        for seed, name in enumerate(("q_proj", "k_proj", "v_proj"))
    }

    class Mixed(Format):
        def stored(self, name: str, weight: torch.Tensor) -> Any:
            return forms.get(name.rpartition(".")[2], FORMATS["gptq_4_32"]).stored(name, weight)

    save_quantized(theirs, tmp_path, Mixed("gptq"))
    check_prompt(load(tmp_path), theirs)


def test_memory_is_that_of_the_files(tmp_path: Path) -> None:
    saved(LLAMA, tmp_path, FORMATS["awq_32"])
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    assert config.quantization == "as_stored"
    assert config.weight_bytes == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["awq_32", "fp8_tensor"])
def test_experts(name: str, tmp_path: Path) -> None:
    """They are dequantized when they are loaded."""
    theirs = random_model(FAMILIES["qwen3_moe"].config(**WIDE, moe_intermediate_size=64))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = dict(theirs.named_parameters())
    for key in [key for key in tensors if ".experts." in key]:
        layer = key.removesuffix(".weight")
        stored, weight = FORMATS[name].stored(layer, tensors.pop(key))
        tensors |= {one: tensor.contiguous() for one, tensor in stored.items()}
        block, number, part = layer.rsplit(".", 2)
        joined = "down_proj" if part == "down_proj" else "gate_up_proj"
        rows = slice(64, 128) if part == "up_proj" else slice(0, len(weight))
        with torch.no_grad():
            experts[f"{block}.{joined}"][int(number), rows] = weight
    save_file(tensors, tmp_path / "model.safetensors")
    change_config(tmp_path, quantization_config=FORMATS[name].config)
    check_prompt(load(tmp_path), theirs)
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    assert config.weight_bytes > 4 * config.num_expert_parameters


def test_int8_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """The stored weights are rounded again."""
    theirs = saved(LLAMA, tmp_path, FORMATS["gptq_4_32_act_order"])
    for layer in theirs.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(rounded(layer.weight.detach()))
    config = load_model_config(
        str(tmp_path), load_format="auto", dtype="float32", quantization="int8"
    )
    check_prompt(load_model(config, torch.device("cpu")), theirs)
    check_prompt(DividedModel(config, 2, 1), theirs)  # type: ignore[arg-type]


def test_the_text_model_of_one_that_reads_images(tmp_path: Path) -> None:
    theirs = saved(FAMILIES["mistral"].config(**WIDE), tmp_path, FORMATS["awq_32"])
    text = theirs.config.to_dict()
    change_config(tmp_path, model_type="mistral3", text_config=text)
    check_prompt(load(tmp_path), theirs)


def test_activations_that_stay_exact_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(LLAMA, tmp_path, FORMATS["fp8_blocks"])
    with caplog.at_level("INFO", logger="fastserve_backend.models.loader"):
        load(tmp_path)
    assert "activations of few bits; here they stay in float32" in caplog.text


def test_a_format_without_its_config_is_refused(tmp_path: Path) -> None:
    saved(LLAMA, tmp_path, FORMATS["awq_32"])
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelError, match=r"qweight is unexpected"):
        load(tmp_path)
