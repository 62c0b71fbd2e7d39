"""Models and engines of the checks: OPT's sizes, and small stand-ins for a dry run."""

from __future__ import annotations

import json
from typing import Any, Final

from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config import EngineConfig

from benchmarks.gpu.phase_context import Context

MODELS = ("opt-125m", "opt-1.3b", "opt-13b")
DTYPE: Final = "bfloat16"
BYTES_OF_VALUE = 2
WEIGHTS_SHARE = 0.6
"""Largest share of the device's memory for weights: more leaves too little for KV."""
_DRY_RUN_OPT = {
    "model_type": "opt",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 50272,  # as OPT's
    "max_position_embeddings": 2048,
    "activation_function": "relu",
}
_DRY_RUN_OPTIONS = {
    "device": "cpu",
    "max_model_len": 512,
    "device_blocks": 150,
    "swap_space_gib": 0.02,
}


def model_of(context: Context, name: str) -> str:
    """What to load for a model of this built-in name."""
    if not context.tiny:
        return name
    directory = context.scratch / f"tiny-{name}"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_DRY_RUN_OPT), encoding="utf-8")
    return str(directory)


def largest_model(context: Context) -> str:
    """The largest of ``MODELS`` that fits on the device."""
    fitting = [
        name
        for name in MODELS
        if BYTES_OF_VALUE * load_model_config(name, load_format="dummy").num_parameters
        <= WEIGHTS_SHARE * context.device.memory_bytes
    ]
    return fitting[-1] if fitting else MODELS[0]


def engine_config(context: Context, name: str, **keys: Any) -> EngineConfig:
    """Configuration with random weights; ``keys`` are those of ``engine.yaml``.

    Prefix caching is off: an engine gets the same prompts at several rates, and has to compute them
    each time.
    """
    common = {"load_format": "dummy", "dtype": DTYPE, "prefix_caching": False}
    keys = {"model": model_of(context, name), **common, **keys}
    return EngineConfig().with_keys(**(keys | (_DRY_RUN_OPTIONS if context.tiny else {})))
