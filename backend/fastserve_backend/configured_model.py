"""The model that a configuration names."""

from __future__ import annotations

from fastserve_backend.config import EngineConfig
from fastserve_backend.models.config import load_model_config
from fastserve_backend.models.model_config import ModelConfig
from fastserve_backend.models.partition import check_parallel


def load_configured_model(config: EngineConfig) -> ModelConfig:
    """Its description, for ranks as ``config`` wants them; fetches what is not here.

    Raises:
        ConfigError, ModelError: there is no such model, or it cannot be divided so.
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
