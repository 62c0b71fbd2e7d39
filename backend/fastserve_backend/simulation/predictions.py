"""Make predictions of known output lengths, with errors of a given size."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def make_predictions(output_tokens: Sequence[int], error: float, seed: int) -> list[int]:
    """Predictions whose ``ln(predicted / real)`` is normally distributed around 0.

    Args:
        output_tokens: real lengths, tokens.
        error: standard deviation of ``ln(predicted / real)``; with 0, predictions are perfect.
        seed: with the same seed, errors scale with ``error``.

    Returns:
        One for each length, at least 1.
    """
    rng = random.Random(seed)
    return [max(1, round(real * math.exp(error * rng.gauss(0.0, 1.0)))) for real in output_tokens]
