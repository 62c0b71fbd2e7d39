"""The table of cosines and sines that rotates queries and keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fastserve_backend.checkpoints.rotary_config import Rotary
from fastserve_backend.models.rotary_lm import RotaryEmbedding

FREQUENCIES = tuple(10000 ** (-i / 32) for i in range(32))


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_all_are_as_exact_as_their_format(scale: float) -> None:
    rotary = Rotary(64, FREQUENCIES, scale, 5000)
    rotation = RotaryEmbedding(rotary, 5000, torch.device("cpu"))(torch.arange(5000))
    table = rotation.cos_sin.double().numpy()
    angles = np.outer(np.arange(5000, dtype=np.float32), np.array(FREQUENCIES, np.float32))
    exact = scale * np.concatenate([np.cos(angles, dtype=float), np.sin(angles, dtype=float)], 1)
    assert (np.abs(table - exact) <= np.spacing(np.abs(exact).astype(np.float32)) / 2).all()


def test_none_are_made_by_threads_of_torch() -> None:
    """Such threads compute wrong values so rarely that only many processes on busy cores would show
    it."""
    with torch.profiler.profile() as profile:
        RotaryEmbedding(Rotary(64, FREQUENCIES, 1.0, 5000), 5000, torch.device("cpu"))
    operations = {event.key for event in profile.key_averages()}
    assert operations.isdisjoint({"aten::cos", "aten::sin"})
