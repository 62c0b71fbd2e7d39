"""GGUF files of each family are mapped and compared with their original models."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import DTYPE_BYTES, DType
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.weights import checkpoint_tensors
from fastserve_kernels import ops
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_families import VARIANTS, Variant
from gguf_files import Arrays, Blocks, Fields, assert_equal, tensors_of
from paged_executor import PagedExecutor, check, expected_logits, load, prompts
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

# Fields of transformers' configurations that a conversion may change: they name files and formats,
# say what end tokens are, or are for training.
_OTHER_FIELDS = {
    "_name_or_path",
    "architectures",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


@pytest.fixture(scope="module", params=VARIANTS)
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    """A model in transformers, and the directory with its converted GGUF file."""
    directory = tmp_path_factory.mktemp(request.param)
    variant: Variant = VARIANTS[request.param]
    model = variant.model()
    convert(variant.write(directory / "m.gguf", model), directory / "out")
    return model, directory / "out"


def test_tensors_are_those_of_the_models_checkpoint(
    converted: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, directory = converted
    model.save_pretrained(tmp_path)
    expected = {
        stored.name: stored.read_dequantized(()).bfloat16()
        for stored in checkpoint_tensors(tmp_path)
    }
    assert_equal(tensors_of(directory), expected)


def test_configuration_means_the_models(converted: tuple[PreTrainedModel, Path]) -> None:
    model, directory = converted
    got, expected = (
        {key: value for key, value in config.to_dict().items() if key not in _OTHER_FIELDS}
        for config in (AutoConfig.from_pretrained(directory), model.config)
    )
    assert approximately(got) == approximately(expected)


def approximately(value: Any) -> Any:
    """Files have numbers in float32."""
    if isinstance(value, dict):
        return {key: approximately(one) for key, one in value.items()}
    if isinstance(value, list):
        return [approximately(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


@torch.inference_mode()
def test_transformers_computes_the_models_logits(
    converted: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    """From the converted configuration and the mapped weights."""
    model, directory = converted
    weights = {name: tensor.contiguous() for name, tensor in tensors_of(directory).items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(directory / "config.json", tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    (tokens,) = prompts(30)
    torch.testing.assert_close(
        expected_logits(again, tokens), expected_logits(model, tokens), rtol=0, atol=1e-4
    )


def test_logits_are_the_models(converted: tuple[PreTrainedModel, Path]) -> None:
    model, directory = converted
    executor = PagedExecutor(load(directory), model.config, prompts(30, 7), seed=1)
    executor.step([(0, 30), (1, 7)])
    check(model, executor)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3moe"])
@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q8_0])
def test_quantised_experts(tmp_path: Path, name: str, kind: Kind) -> None:
    """The weights are exactly the file's values, rounded once."""
    variant = VARIANTS[name]
    model = variant.model()

    def round_as_stored(fields: Fields, arrays: Arrays) -> None:
        for key, array in arrays.items():
            if array.ndim > 1:
                arrays[key] = dequantize(quantize(array, kind), kind)

    convert(variant.write(tmp_path / "m.gguf", model, kind=kind), tmp_path / "out")
    convert(variant.write(tmp_path / "exact.gguf", model, round_as_stored), tmp_path / "exact")
    assert_equal(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "exact"))


# A layer of Mixtral has other types than the next one.
EXPERT_KINDS = [
    {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"},
    {"ffn_gate_exps": "Q5_0", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q5_K"},
    {"ffn_gate_exps": "Q4_1", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q5_1"},
]


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "olmoe", "gpt_oss"])
def test_experts_in_few_bits_compute_what_dequantized_ones_do(
    tmp_path: Path, name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; and they stay in few bits."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    variant = replace(VARIANTS[name], changes={**VARIANTS[name].changes, **sizes})
    model = variant.model()
    blocks: dict[str, Blocks] = {}

    def quantize_experts(fields: Fields, arrays: Arrays) -> None:
        for layer, kinds in enumerate(EXPERT_KINDS):
            for part, kind in kinds.items():
                key = f"blk.{layer}.{part}.weight"
                if name == "gpt_oss":  # its gate and up are one matrix
                    kind = ("MXFP4", "Q8_0", "Q5_1")[layer]
                    blocks[key] = Blocks(Kind[kind], quantize(arrays[key], Kind[kind]))
                else:
                    blocks[key] = Blocks.random(kind, *arrays[key].shape)

    def dequantize_experts(fields: Fields, arrays: Arrays) -> None:
        arrays |= {key: one.dequantized() for key, one in blocks.items()}

    convert(
        variant.write(tmp_path / "m.gguf", model, quantize_experts, blocks=blocks), tmp_path / "few"
    )
    convert(variant.write(tmp_path / "exact.gguf", model, dequantize_experts), tmp_path / "exact")
    logits = []
    layers_of_models: list[list[ops.GroupedLinear]] = []

    class Noted(ops.GroupedLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            layers_of_models[-1].append(self)

    monkeypatch.setattr(ops, "GroupedLinear", Noted)
    for directory in (tmp_path / "few", tmp_path / "exact"):
        layers_of_models.append([])
        config = load_model_config(str(directory), load_format="auto", dtype=dtype)
        ours = load_model(config, torch.device("cpu"))
        executor = PagedExecutor(ours, model.config, prompts(31, 8), seed=1)
        executor.cast(getattr(torch, dtype))
        executor.step([(0, 30), (1, 7)])
        executor.step([(0, 1), (1, 1)])
        logits.append(torch.stack([row for job in executor.jobs for row in job.logits]))
    if dtype == "float32":
        assert torch.equal(*logits)
    else:  # rows may be rounded to 8 bits, and random weights make much of it
        few_bits, exact = (one.float() for one in logits)
        assert (few_bits - exact).norm() < 0.2 * exact.norm()
    few = load_model_config(str(tmp_path / "few"), load_format="auto", dtype=dtype)
    saved = sum(
        one.dequantized().size * DTYPE_BYTES[dtype]
        - one.data.nbytes * (5.5 / 4.25 if one.kind == Kind.MXFP4 else 1)
        for one in blocks.values()
    )
    assert few.weight_bytes == config.weight_bytes - saved
    memory = [sum(layer.nbytes for layer in layers) for layers in layers_of_models]
    assert memory[1] - memory[0] == pytest.approx(saved, rel=0.01)
