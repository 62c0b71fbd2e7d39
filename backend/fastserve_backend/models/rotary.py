"""By which angles queries and keys are rotated at their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_backend.models.rotary_config import Rotary


class RotaryEmbedding:
    """Cosines and sines of all positions, looked up once a step for all layers."""

    def __init__(self, rotary: Rotary, positions: int, device: torch.device) -> None:
        frequencies = torch.tensor(rotary.frequencies, dtype=torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        table = torch.cat([angles.cos(), angles.sin()], dim=1) * rotary.scale
        self._table = table.to(device)

    def __call__(self, positions: Tensor) -> Tensor:
        """positions int64 [T] -> float32 [T, dim]: dim / 2 cosines, then as many sines."""
        return self._table[positions]
