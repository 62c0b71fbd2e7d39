"""LLaMA and GPT-NeoX against transformers' in float32: logits of every position, however served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_backend.models.config import load_model_config
from fastserve_backend.models.errors import ModelError
from fastserve_backend.models.loader import CausalLM, load_model
from paged_executor import POSITIONS, PagedExecutor, check, expected_logits, load, prompts
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedModel,
)

LLAMA: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
NEOX: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
THETA = {"rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12},
    "yarn_scaled": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
}
VARIANTS: dict[str, Any] = {
    "llama": LlamaConfig(**LLAMA),
    "llama_multi_head": LlamaConfig(**LLAMA | {"num_key_value_heads": 4}),
    "llama_one_kv_head": LlamaConfig(**LLAMA | {"num_key_value_heads": 1}),
    "llama_tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama_wide_heads": LlamaConfig(**LLAMA, head_dim=24),
    "llama_theta": LlamaConfig(**LLAMA, rope_parameters={"rope_theta": 500.0}),
    **{
        f"llama_{name}": LlamaConfig(**LLAMA, rope_parameters=THETA | rope)
        for name, rope in ROPES.items()
    },
    "neox": GPTNeoXConfig(**NEOX),
    "neox_sequential": GPTNeoXConfig(**NEOX, use_parallel_residual=False),
    "neox_whole_rotary": GPTNeoXConfig(**NEOX, rotary_pct=1.0),
    "neox_tanh": GPTNeoXConfig(**NEOX, hidden_act="gelu_new"),
    "neox_no_attention_bias": GPTNeoXConfig(**NEOX, attention_bias=False),
    "neox_tied": GPTNeoXConfig(**NEOX, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def random_model(config: Any) -> PreTrainedModel:
    """A transformers model whose weights, biases and norms are all random."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.15)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, CausalLM]:
    """The same random weights in transformers' model and in ours."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = random_model(VARIANTS[request.param])
    theirs.save_pretrained(directory)
    return theirs, load(directory)


def test_whole_prompts_batched(pair: tuple[PreTrainedModel, CausalLM]) -> None:
    theirs, ours = pair
    executor = PagedExecutor(ours, theirs.config, prompts(1, 7, 48, 4, 5), seed=1)
    work = [(i, len(job.tokens)) for i, job in enumerate(executor.jobs)]
    executor.step(work, padding=3)
    check(theirs, executor)


def test_chunks_and_decodes_mixed(pair: tuple[PreTrainedModel, CausalLM]) -> None:
    theirs, ours = pair
    executor = PagedExecutor(ours, theirs.config, prompts(20, 30, 9), seed=2)
    executor.step([(0, 5), (1, 11)])
    executor.step([(0, 1), (1, 13), (2, 9)])
    while any(job.done < len(job.tokens) for job in executor.jobs):
        work = [(i, 1) for i, job in enumerate(executor.jobs) if job.done < len(job.tokens)]
        executor.step(work, padding=1)
    check(theirs, executor)


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
    "name", ["llama-7b", "llama-3-8b", "smollm2-135m", "pythia-160m", "pythia-12b"]
)
def test_published_sizes(name: str) -> None:
    """Parameters of the published checkpoints, in millions."""
    known = {
        "llama-7b": 6738.4,
        "llama-3-8b": 8030.3,
        "smollm2-135m": 134.5,
        "pythia-160m": 162.3,
        "pythia-12b": 11846.1,
    }
    config = load_model_config(name, load_format="dummy")
    assert round(config.num_parameters / 1e6, 1) == known[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_counted(name: str, tmp_path: Path) -> None:
    theirs = random_model(VARIANTS[name])
    theirs.save_pretrained(tmp_path)
    config = load_model_config(str(tmp_path), load_format="auto")
    assert config.num_parameters == sum(p.numel() for p in theirs.parameters())


def test_older_configurations_name_their_rotation_differently(tmp_path: Path) -> None:
    theirs = random_model(VARIANTS["llama_llama3"])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    file.write_text(json.dumps(fields | {"rope_theta": theta, "rope_scaling": rope}))
    executor = PagedExecutor(load(tmp_path), theirs.config, prompts(40), seed=4)
    executor.step([(0, 40)])
    check(theirs, executor)


def test_buffers_of_older_checkpoints_are_ignored(tmp_path: Path) -> None:
    for name, buffers in {
        "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of the 4 heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type is 'longrope', expected one of",
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
