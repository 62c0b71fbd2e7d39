"""Fields of GGUF files that change a model's answers are either used or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.rotary_config import Rotary
from gguf_files import Arrays, Fields, random_llama, write_llama

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

SCALING = "llama.rope.scaling"
YARN = {f"{SCALING}.type": "yarn", f"{SCALING}.factor": 4.0}


def rotary(tmp_path: Path, added: dict[str, Any]) -> Rotary:
    """The rotation of a model with heads of 16 elements and these fields."""

    def change(fields: Fields, arrays: Arrays) -> None:
        fields |= added

    convert(write_llama(tmp_path / "m.gguf", random_llama(), change=change), tmp_path / "out")
    config = load_model_config(str(tmp_path / "out"), load_format="auto")
    return config.rotaries[0]  # type: ignore[attr-defined, no-any-return]


def test_attention_factor_of_yarn(tmp_path: Path) -> None:
    """llama.cpp's converter stores transformers' attention_factor in this field."""
    given = rotary(tmp_path, YARN | {f"{SCALING}.yarn_attn_factor": 1.25})
    assert given.scale == 1.25


@pytest.mark.parametrize(
    "fields",
    [
        {"llama.rope.dimension_count": 16},
        {"llama.attention.scale": 0.25},
        {"llama.attention.scale": 0.0},
        {"llama.logit_scale": 1.0},
        YARN
        | {
            f"{SCALING}.attn_factor": 1.0,
            f"{SCALING}.yarn_ext_factor": 1.0,
            f"{SCALING}.yarn_log_multiplier": 0.0,
        },
    ],
)
def test_values_that_change_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert rotary(tmp_path, fields).dim == 16


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("llama.rope.dimension_count", 8, "16"),
        ("llama.attention.scale", 0.5, "0.25"),
        ("llama.logit_scale", 2.0, "1.0"),
        (f"{SCALING}.alpha", 4.0, "0.0"),
        (f"{SCALING}.attn_factor", 1.5, "1.0"),
        (f"{SCALING}.yarn_ext_factor", 0.5, "1.0"),
        (f"{SCALING}.yarn_log_multiplier", 0.1, "0.0"),
    ],
)
def test_values_that_are_not_supported(
    tmp_path: Path, key: str, value: float, supported: str
) -> None:
    with pytest.raises(ModelError, match=f"{key} is .*, but only {supported} is supported; use"):
        rotary(tmp_path, YARN | {key: value})


def test_heads_too_large_are_refused_before_their_rotation_is_computed(tmp_path: Path) -> None:
    def change(fields: Fields, arrays: Arrays) -> None:
        fields["llama.attention.key_length"] = 4096
        arrays["rope_freqs.weight"] = arrays["output_norm.weight"]

    file = write_llama(tmp_path / "m.gguf", random_llama(), change=change)
    with pytest.raises(ModelError, match="the attention kernels need a multiple of 8 up to"):
        convert(file, tmp_path / "out")
