"""Loads the description and the tokenizer of the model that a configuration names."""

from __future__ import annotations

import logging
from dataclasses import replace

from fastserve_backend.checkpoints.end_tokens import end_tokens
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import check_parallel
from fastserve_backend.checkpoints.tokenizer import Tokenizer, load_tokenizer
from fastserve_backend.config import EngineConfig

_log = logging.getLogger(__name__)


def load_configured_model(config: EngineConfig) -> ModelConfig:
    """The model's description. Files that are not here are fetched.

    Raises:
        ModelError: there is no such model.
        ConfigError: it cannot be divided among as many ranks as ``config`` asks for.
    """
    model, parallel = config.model, config.parallel
    described = load_model_config(
        model.model,
        load_format=model.load_format,
        device="cuda" if model.device == "cuda" else "cpu",
        dtype=model.dtype,
        quantization=model.quantization,
        kv_dtype=config.kv_cache.device_dtype,
        max_model_len=model.max_model_len,
    )
    check_parallel(described, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return described


def load_model_and_tokenizer(config: EngineConfig) -> tuple[ModelConfig, Tokenizer]:
    """The model's description and its tokenizer.

    The description has the end tokens that the files of both name; they are logged.

    Raises:
        ConfigError, ModelError: as above, or there is no tokenizer.
    """
    described = load_configured_model(config)
    tokenizer = load_tokenizer(config.model.model, config.model.tokenizer, described)
    ends = end_tokens(described, tokenizer)
    if ends:
        names = ", ".join(f"{one} {tokenizer.written(one)!r}" for one in ends)
        _log.info("an answer ends at token %s", names)
    else:
        _log.warning("no file names an end token: answers end at stop words and max_tokens alone")
    return replace(described, eos_token_ids=ends), tokenizer
