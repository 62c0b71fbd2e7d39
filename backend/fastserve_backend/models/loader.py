"""Build a model with its weights on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from .config import ModelConfig
from .layers import AttentionBatch
from .registry import ARCHITECTURES
from .weights import NamedTensors, Parameter, checkpoint_tensors, dummy_tensors


class CausalLM(Protocol):
    """What every architecture's model class offers; see `opt.OPTModel` for shapes and errors."""

    def parameters(self) -> dict[str, Parameter]: ...

    def load_weights(self, tensors: NamedTensors) -> None: ...

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """The number format of the model's weights, activations and KV cache."""
    return cast(torch.dtype, getattr(torch, config.dtype))


def load_model(config: ModelConfig, device: torch.device, *, dummy_seed: int = 0) -> CausalLM:
    """The model of `config` with its weights: the checkpoint's, or for load_format "dummy" random
    ones.

    Random weights are a function of the configuration and `dummy_seed` alone. Raises ModelError for
    files that are missing, damaged or do not fit the configuration.
    """
    dtype = torch_dtype(config)
    model: CausalLM = ARCHITECTURES[config.architecture].model_class()(config, device, dtype)
    if config.load_format == "dummy":
        model.load_weights(dummy_tensors(model.parameters(), dummy_seed, dtype))
    else:
        assert config.directory is not None  # only dummy configurations have no files
        model.load_weights(checkpoint_tensors(Path(config.directory)))
    return model
