"""Builds a model, or a rank's part of one, with its weights on a device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import torch

from fastserve_backend.checkpoints.architectures import ARCHITECTURES
from fastserve_backend.checkpoints.gguf_index import is_conversion
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.gguf_weights import gguf_tensors
from fastserve_backend.models.model_part import ALONE, ModelPart, TensorGroup
from fastserve_backend.models.quantized_tensors import joined_weights
from fastserve_backend.models.weights import (
    WeightSource,
    checkpoint_tensors,
    dummy_tensors,
    numel,
)

_log = logging.getLogger(__name__)


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """The number format of the model's weights, activations and KV cache."""
    return cast(torch.dtype, getattr(torch, config.dtype))


def load_model(
    config: ModelConfig,
    device: torch.device,
    *,
    layers: range | None = None,
    tensor: TensorGroup = ALONE,
) -> CausalLM:
    """The model of `config` with the checkpoint's weights, or random ones for load_format "dummy".

    Random weights depend on the configuration alone.

    Args:
        layers: build only the stage with these layers; None: all.
        tensor: the ranks that share each layer; this rank builds its share.

    Raises:
        ModelError: files are missing, damaged or do not fit the configuration.
    """
    dtype = torch_dtype(config)
    model_class = ARCHITECTURES[config.architecture].model_class()
    every_layer = range(config.num_layers)
    part = ModelPart(
        device, dtype, layers or every_layer, config.num_layers, tensor, config.quantization
    )
    model: CausalLM = model_class(config, part)
    whole = model
    if part.layers != every_layer or tensor.size > 1:
        # It names other stages' tensors, and other ranks' experts. It takes no memory.
        meta = ModelPart(torch.device("meta"), dtype, every_layer, config.num_layers)
        whole = model_class(config, meta)
    everything = whole.parameters()
    if config.load_format == "dummy":
        num_elements = sum(numel(parameter.shape) for parameter in everything.values())
        parameters = model.parameters()
        model.load_weights(dummy_tensors(parameters, num_elements, dtype, device))
    else:
        assert config.directory is not None  # only dummy configurations have no files
        directory = Path(config.directory)
        read = gguf_tensors if is_conversion(directory) else checkpoint_tensors
        source: WeightSource = read(directory)
        if (stored := config.stored_quantization) is not None:
            source = joined_weights(source, stored)
            reports = part.is_first and tensor.is_first
            if reports and stored.orders_columns and config.num_expert_parameters:
                _log.warning(
                    "experts take as much memory as unquantized ones: with desc_act each has an "
                    "order of columns of its own"
                )
            if reports and stored.rounds_activations:
                _log.info(
                    "the checkpoint is made for activations of few bits; here they stay in %s",
                    config.dtype,
                )
        model.load_weights(source, everything.keys())
    if (error := part.int4_rounding.relative_error) is not None:
        _log.info(
            "rounding to int4 has changed the weights of this rank's linear layers by %.1f%% of "
            "their root mean square",
            100 * error,
        )
    return model
