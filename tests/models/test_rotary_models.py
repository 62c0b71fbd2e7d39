"""LLaMA and GPT-NeoX: their configurations and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import VARIANTS as DECODER_VARIANTS
from decoder_checkpoints import of_each
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.loader import load_model
from paged_executor import PagedExecutor, check_prompt, expected_logits, load, prompts
from rotary_checkpoints import LLAMA, VARIANTS, random_model
from safetensors.torch import load_file, save_file

MODELS = VARIANTS | DECODER_VARIANTS


def test_low_precision_stays_near(tmp_path: Path) -> None:
    theirs = random_model(VARIANTS["llama"])
    theirs.save_pretrained(tmp_path)
    config = load_model_config(str(tmp_path), load_format="auto", dtype="bfloat16")
    executor = PagedExecutor(
        load_model(config, torch.device("cpu")), theirs.config, prompts(30), seed=3
    )
    executor.cast(torch.bfloat16)
    executor.step([(0, 30)])
    expected = expected_logits(theirs, executor.jobs[0].tokens)
    error = (torch.stack(executor.jobs[0].logits).float() - expected).abs().max()
    assert error < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama-7b", 6738.4),
        ("llama-3-8b", 8030.3),
        ("smollm2-135m", 134.5),
        ("pythia-160m", 162.3),
        ("pythia-12b", 11846.1),
        ("qwen2.5-0.5b", 494.0),
        ("qwen3-8b", 8190.7),
        ("mistral-7b", 7241.7),
        ("gemma-3-1b", 999.9),
    ],
)
def test_published_sizes(name: str, millions: float) -> None:
    """Parameters of the published checkpoints."""
    config = load_model_config(name, load_format="dummy")
    assert round(config.num_parameters / 1e6, 1) == millions


@pytest.mark.parametrize("name", of_each(MODELS))
def test_parameters_are_counted(name: str, tmp_path: Path) -> None:
    theirs = random_model(MODELS[name])
    theirs.save_pretrained(tmp_path)
    config = load_model_config(str(tmp_path), load_format="auto")
    stored = load_file(tmp_path / "model.safetensors")
    assert config.num_parameters == sum(tensor.numel() for tensor in stored.values())


def test_older_configurations_name_their_rotation_differently(tmp_path: Path) -> None:
    theirs = random_model(VARIANTS["llama_llama3"])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    file.write_text(json.dumps(fields | {"rope_theta": theta, "rope_scaling": rope}))
    check_prompt(load(tmp_path), theirs, 40)


def test_buffers_of_older_checkpoints_are_ignored(tmp_path: Path) -> None:
    for name, buffers in {
        "llama": [
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.1.self_attn.rotary_emb.cos_cached",
            "model.rotary_emb.sin_cached",
        ],
        "neox": [
            "gpt_neox.layers.0.attention.bias",
            "gpt_neox.layers.1.attention.masked_bias",
            "gpt_neox.layers.2.attention.rotary_emb.inv_freq",
        ],
    }.items():
        directory = tmp_path / name
        random_model(VARIANTS[name]).save_pretrained(directory)
        file = directory / "model.safetensors"
        tensors = load_file(file) | {buffer: torch.ones(3) for buffer in buffers}
        save_file(tensors, file)
        load(directory)


@pytest.mark.parametrize("name", ["neox", "neox_tied"])
def test_the_head_of_gpt_neox_may_have_the_name_of_transformers_5(
    name: str, tmp_path: Path
) -> None:
    theirs = random_model(VARIANTS[name])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    check_prompt(load(tmp_path), theirs, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of the 4 heads"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish', expected one of silu, swish, gelu"),
        (
            {"rope_parameters": {"rope_type": "ntk"}},
            "rope_type is 'ntk', expected one of default, linear, dynamic",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is None, expected a number above 0"),
        ({"rope_parameters": 5}, "rope_parameters is 5, expected an object"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number above 0"),
        ({"head_dim": 12}, "is 12, but the attention kernels"),
    ],
)
def test_bad_configurations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = {"model_type": "llama", **LLAMA, **changes}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        load_model_config(str(tmp_path), load_format="dummy")


def test_dynamic_rotation_is_limited_to_the_positions_where_it_does_not_change(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
    fields = {"model_type": "llama", **LLAMA, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_model_config(str(tmp_path), load_format="dummy").max_model_len == 32
