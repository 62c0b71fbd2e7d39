"""What a rank builds of a model, and on what."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastserve_backend.checkpoints.model_config import Quantization
from fastserve_backend.models.tensor_group import ALONE, TensorGroup


@dataclass(frozen=True)
class ModelPart:
    """Some neighbouring layers of a model, and this rank's part of each.

    The stage with the first layer has the embeddings, that with the last the final norm and the
    LM head.
    """

    device: torch.device
    dtype: torch.dtype
    layers: range
    num_layers: int
    """Of the whole model."""
    tensor: TensorGroup = ALONE
    quantization: Quantization | None = None

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers
