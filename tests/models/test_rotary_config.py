"""The rotary fields of a config.json are read as in transformers, or refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.rotary_config import Rotary
from transformers import AutoConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 301,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 80,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
NEOX = LLAMA | {"model_type": "gpt_neox"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
TRAINED = "original_max_position_embeddings"


def read(directory: Path, fields: dict[str, Any]) -> Rotary:
    (directory / "config.json").write_text(json.dumps(fields))
    config = load_model_config(str(directory), load_format="dummy")
    rotary = config.rotaries[0]  # type: ignore[attr-defined]
    assert isinstance(rotary, Rotary)
    return rotary


@pytest.mark.parametrize(
    "fields",
    [
        LLAMA | {"rope_scaling": LLAMA3},
        LLAMA | {"rope_scaling": LLAMA3, TRAINED: 64},
        LLAMA | {"rope_scaling": LLAMA3 | {TRAINED: 64}},
        LLAMA | {"rope_scaling": LLAMA3 | {TRAINED: 64}, TRAINED: 32},
        LLAMA | {"rope_scaling": YARN},
        LLAMA | {"rope_scaling": YARN, TRAINED: 64},
        LLAMA | {"rope_scaling": YARN | {TRAINED: 64}, TRAINED: 32},
        LLAMA | {"rope_scaling": YARN, "rope_parameters": {}},
        LLAMA | {"rope_scaling": {}, "rope_parameters": YARN},
        LLAMA | {"rope_scaling": YARN, "rope_parameters": YARN},
        # The same values in another spelling.
        LLAMA
        | {
            "rope_scaling": {"type": "yarn", "factor": 4},
            "rope_parameters": YARN | {"rope_theta": 1e4},
        },
        LLAMA
        | {
            "rope_theta": 500,
            "rope_scaling": LLAMA3,
            "rope_parameters": LLAMA3 | {"rope_theta": 500.0, TRAINED: 256},
        },
        LLAMA | {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 1e4}},
        NEOX
        | {
            "rotary_pct": 0.5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
        },
        LLAMA | {"rope_theta": 77.0, "rope_parameters": {"rope_theta": 500.0}},
        LLAMA | {"partial_rotary_factor": 1.0},
        NEOX,
        NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 500},
        NEOX | {"rotary_pct": 0.5, "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        NEOX | {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        NEOX | {"head_dim": 32},
        LLAMA | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}},
        LLAMA | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0}},
        LLAMA | {"rope_scaling": YARN | {"mscale": 0.0, "mscale_all_dim": 0.707}},
    ],
)
def test_as_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    ours = read(tmp_path, fields)
    theirs = AutoConfig.from_pretrained(tmp_path)
    is_llama = fields["model_type"] == "llama"
    module = (LlamaRotaryEmbedding if is_llama else GPTNeoXRotaryEmbedding)(theirs)
    torch.testing.assert_close(
        torch.tensor(ours.frequencies), module.inv_freq, rtol=1e-5, atol=1e-9
    )
    assert ours.dim == 2 * len(module.inv_freq)
    assert ours.scale == pytest.approx(module.attention_scaling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # The kernels would write outside the heads.
        (NEOX | {"rotary_pct": 25}, r"\(rotary_pct\) is 25, expected a share of a head's 32"),
        (NEOX | {"rotary_pct": 2.0}, r"\(rotary_pct\) is 2, expected a share"),
        (NEOX | {"rotary_pct": 0.03}, r"\(rotary_pct\) is 0\.03, expected a share"),
        (NEOX | {"rotary_pct": 0.3}, "that is an even number of them"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "of this family rotate them all"),
        (
            LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rotation of 16 of a head's 32 elements, but",
        ),
        (
            LLAMA | {"rope_parameters": LLAMA3, "rope_scaling": YARN},
            r"rope_scaling is .* expected the same rotation as in rope_parameters, or one of them",
        ),
        (
            LLAMA
            | {
                "rope_theta": 1e4,
                "rope_scaling": LLAMA3,
                "rope_parameters": LLAMA3 | {"rope_theta": 500.0},
            },
            "expected the same rotation as in rope_parameters",
        ),
        (
            LLAMA | {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}},
            "expected the same rotation as in rope_parameters",
        ),
        (LLAMA | {"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta is 1, expected a number"),
        # transformers would use it for the rotation alone.
        (NEOX | {"head_dim": 16}, "head_dim is 16, expected hidden_size / num_attention_heads, 32"),
        # The refusal comes before that many frequencies are computed.
        (LLAMA | {"head_dim": 4096}, "is 4096, but the attention kernels need"),
        (NEOX | {"hidden_size": 2**17}, "but the attention kernels need a multiple of 8 up to"),
    ],
)
def test_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, fields)


def test_a_base_that_one_object_leaves_out_is_that_of_the_other(tmp_path: Path) -> None:
    """``rope_scaling`` has never held the base."""
    alone = LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}
    assert read(tmp_path, alone | {"rope_scaling": LLAMA3}) == read(tmp_path, alone)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (
            "Gemma3Text",
            {"rope_theta": 1e6, "rope_local_base_freq": 700.0, "rope_scaling": None},
        ),
        (
            "Gemma3Text",
            {"rope_theta": 5e5, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        ),
        (
            "Olmo3",
            {"rope_theta": 5e5, "rope_scaling": YARN | {TRAINED: 64, "attention_factor": 1.2}},
        ),
    ],
)
def test_rotations_by_type_of_layer_in_older_spelling(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 6}
    newer = getattr(transformers, f"{family}Config")(**sizes, **deepcopy(fields))
    older = {"model_type": newer.model_type, **sizes, **fields}
    written = []
    for config in (older, newer.to_dict()):
        (tmp_path / "config.json").write_text(json.dumps(config))
        written.append(load_model_config(str(tmp_path), load_format="dummy"))
    assert written[0].rotaries == written[1].rotaries  # type: ignore[attr-defined]
    assert len(set(written[0].rotaries)) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"rope_scaling": YARN | {TRAINED: 256}}, 1024),  # Qwen's recipe for long contexts
        ({"rope_scaling": YARN}, 1024),
        ({"rope_scaling": YARN | {TRAINED: 64}}, 256),  # the length is stated
        ({"rope_scaling": YARN | {TRAINED: 16}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": LLAMA3 | {TRAINED: 256}}, 256),
    ],
)
def test_yarn_extends_the_context(fields: dict[str, Any], positions: int, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | fields).max_positions == positions


def test_an_implausible_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="max_position_embeddings by YaRN is"):
        read(tmp_path, LLAMA | {"rope_scaling": YARN | {"factor": 1e9}})
