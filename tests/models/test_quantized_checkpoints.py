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
from fastserve_kernels.quantized_weight import QuantizedWeight
from fastserve_kernels.weight_quantization import rounded
from log_records import messages_of
from paged_executor import PagedExecutor, check_chunked_prompts, check_prompt, load, prompts
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
    messages = messages_of(caplog, "fastserve_backend.models")
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


def save_with_quantized_experts(theirs: PreTrainedModel, directory: Path, form: Format) -> int:
    """Their own weights become those that are stored. Returns the bytes of all experts."""
    theirs.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    experts = dict(theirs.named_parameters())
    num_bytes = 0
    for key in [key for key in tensors if ".experts." in key]:
        layer = key.removesuffix(".weight")
        stored, weight = form.stored(layer, tensors.pop(key))
        tensors |= {one: tensor.contiguous() for one, tensor in stored.items()}
        num_bytes += sum(tensor.nbytes for tensor in stored.values())
        block, number, part = layer.rsplit(".", 2)
        block = block.replace("block_sparse_moe", "mlp")
        joined = "down_proj" if part in ("down_proj", "w2") else "gate_up_proj"
        rows = slice(len(weight) if part in ("up_proj", "w3") else 0, None)
        with torch.no_grad():
            experts[f"{block}.{joined}"][int(number), rows][: len(weight)] = weight
    save_file(tensors, directory / "model.safetensors")
    change_config(directory, quantization_config=form.config)
    return num_bytes


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("name", [*SOME, "awq_128", "packed_4_32", "gptq_4_128", "float_group"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts(
    family: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They stay in few bits, and compute what dequantized ones do, bit for bit."""
    layers: list[ops.GroupedLinear] = []

    class Noted(ops.GroupedLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            layers.append(self)

    class Dequantized(ops.GroupedLinear):
        def load(self, group: int, weights: Any, bias: torch.Tensor | None = None) -> None:
            assert all(isinstance(one, QuantizedWeight) for one in weights)
            super().load(group, [one.dequantized(torch.float32) for one in weights], bias)

    sizes = WIDE | ({} if family == "mixtral" else {"moe_intermediate_size": 256})
    theirs = random_model(FAMILIES[family].config(**sizes))
    num_bytes = save_with_quantized_experts(theirs, tmp_path, FORMATS[name])
    logits = []
    for kind in (Noted, Dequantized):
        monkeypatch.setattr(ops, "GroupedLinear", kind)
        model = load(tmp_path)
        check_prompt(model, theirs)
        executor = PagedExecutor(model, theirs.config, prompts(31, 8), seed=1)
        executor.step([(0, 30), (1, 7)])
        executor.step([(0, 1), (1, 1)])
        logits.append(torch.stack([row for job in executor.jobs for row in job.logits]))
    assert torch.equal(*logits)
    memory = sum(layer.nbytes for layer in layers)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    if "act_order" in name:  # each expert's columns have an order of their own
        assert memory > 6 * num_bytes
        assert config.weight_bytes > 4 * config.num_expert_parameters
        assert "experts take as much memory as unquantized ones" in caplog.text
    else:
        assert memory < (1.2 if FORMATS[name].group in (32, 64) else 1.1) * num_bytes
        assert config.weight_bytes == file_bytes
        assert "experts" not in caplog.text


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
