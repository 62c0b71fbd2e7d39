"""How a layer turns scores into attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionRule:
    """What differs from layer to layer, beside shapes.

    scale: positive factor of the scores.
    window: a row attends to so many tokens, of which its own is the last; None: to all up to its
        own (Mistral 7B, Jiang et al. 2023).
    soft_cap: c turns each scaled score s into c · tanh(s / c); None: it stays (Gemma 2).
    sinks: float32 [heads], contiguous: one more score for each head, with a value of zeros; None:
        there is none (gpt-oss).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def first_visible(self, position: int) -> int:
        """The first position to which the row at `position` attends."""
        return 0 if self.window is None else max(0, position + 1 - self.window)
