"""Rotary embeddings of GGUF files as `rope_parameters` of a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_file import GGUFFile
from fastserve_backend.checkpoints.gguf_tensors import sizes
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.rotary_config import read_rotary

Config = Mapping[str, Any]

LLAMA3_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies. llama.cpp's converter computes them for Llama 3.1 and later."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Divisors of the frequencies for texts beyond and within the trained length."""

# Optional fields of rotary scaling: GGUF's names -> Hugging Face's.
_OPTIONS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def rotary(file: GGUFFile, config: Config) -> dict[str, Any]:
    """One rotation for all layers. Raises ModelError if it is not known here."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": file.own("rope.freq_base") or 1e4,
    }
    factor = file.own("rope.scaling.factor") or file.own("rope.scale_linear")
    # As in llama.cpp, a factor without a type means linear scaling.
    kind = file.own("rope.scaling.type") or ("linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"its rotary scaling is {kind!r}; supported are linear, yarn, that of Llama 3.1, and "
            "longrope for phi3"
        )
    if kind != "none":
        rope |= {
            "rope_type": kind,
            "factor": factor or file.required(file.key("rope.scaling.factor")),
        }
        for theirs, ours in _OPTIONS.items():
            if (value := file.own(f"rope.scaling.{theirs}")) is not None:
                rope[ours] = value
    if LLAMA3_FACTORS in file.tensors:
        rope = _llama3(rope, file.values(LLAMA3_FACTORS), config)
    return rope


def rotary_by_layer_type(file: GGUFFile, config: Config) -> dict[str, Any]:
    """OLMo 3's two rotations: layers with a window have no scaling, and may have another base."""
    whole = rotary(file, config)
    theta = file.own("rope.freq_base_swa", whole["rope_theta"])
    return {
        "full_attention": whole,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


def rotary_of_gemma3(file: GGUFFile, config: Config) -> dict[str, Any]:
    """As OLMo 3's. Older files have no field for the other base."""
    rope = rotary_by_layer_type(file, config)
    rope["sliding_attention"]["rope_theta"] = file.own("rope.freq_base_swa", 1e4)
    return rope


def partial_rotary(file: GGUFFile, config: Config) -> dict[str, Any]:
    """Phi-3's rotation of a part of each head, with LongRoPE if the file has its factors."""
    head_dim = sizes(config)["head_dim"]
    share = {"partial_rotary_factor": file.own("rope.dimension_count", head_dim) / head_dim}
    missing = [name for name in (LONG_FACTORS, SHORT_FACTORS) if name not in file.tensors]
    if len(missing) == 2 and file.own("rope.scaling.type") != "longrope":
        return rotary(file, config) | share
    if missing:
        raise ModelError(f"it lacks tensor {missing[0]!r}, which its rotary scaling asks for")
    rope = {
        "rope_type": "longrope",
        "rope_theta": file.own("rope.freq_base") or 1e4,
        "long_factor": file.values(LONG_FACTORS),
        "short_factor": file.values(SHORT_FACTORS),
        "original_max_position_embeddings": file.required(
            file.key("rope.scaling.original_context_length")
        ),
    }
    if (factor := file.own("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = factor
    return rope | share


def untruncated_yarn(file: GGUFFile, config: Config) -> dict[str, Any]:
    """gpt-oss's YaRN, whose ramp is not rounded to whole dimensions. Files have no field for it."""
    return rotary(file, config) | {"truncate": False}


def rotary_with_growing_queries(file: GGUFFile, config: Config) -> dict[str, Any]:
    """Ministral 3's YaRN, which does not scale attention, but queries by their positions."""
    mscale = file.own("rope.scaling.yarn_log_multiplier", 1.0)
    return rotary(file, config) | {
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "llama_4_scaling_beta": file.own("attention.temperature_scale"),
    }


def _llama3(rope: dict[str, Any], factors: list[float], config: Config) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling that give these factors for the frequencies."""
    scaled = rope | {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, wanted = (_frequencies(one, config) for one in (rope, scaled))
    given = [one / factor for one, factor in zip(plain, factors, strict=False)]
    if len(factors) != len(plain) or not all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(given, wanted, strict=True)
    ):
        raise ModelError(
            f"the frequency factors in {LLAMA3_FACTORS} are not those of Llama 3.1; use the "
            "model's Hugging Face checkpoint"
        )
    return scaled


def _frequencies(rope: dict[str, Any], config: Config) -> tuple[float, ...]:
    raw = HFConfig({"rope_parameters": rope}, "its metadata")
    return read_rotary(
        raw,
        sizes(config)["head_dim"],
        config["max_position_embeddings"],
        theta=("rope_theta", 1e4),
        share=("partial_rotary_factor", 1.0),
    ).frequencies
