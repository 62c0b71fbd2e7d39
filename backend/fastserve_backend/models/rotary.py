"""By which angles queries and keys are rotated at their positions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastserve_backend.checkpoints.rotary_config import Rotary


class RotaryEmbedding:
    """Cosines and sines of all positions, looked up once a step for all layers."""

    def __init__(self, rotary: Rotary, positions: int, device: torch.device) -> None:
        frequencies = np.array(rotary.frequencies, dtype=np.float32)
        angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)
        # Not by torch: the first cosines of a process are now and then wrong by 1e-4 on a CPU, if
        # two threads of MKL come to them at once (github.com/pytorch/pytorch/issues/188792).
        parts = [function(angles, dtype=np.float64) for function in (np.cos, np.sin)]
        table = np.concatenate(parts, axis=1) * rotary.scale
        self._table = torch.from_numpy(table.astype(np.float32)).to(device)

    def __call__(self, positions: Tensor) -> Tensor:
        """positions int64 [T] -> float32 [T, dim]: dim / 2 cosines, then as many sines."""
        return self._table[positions]
