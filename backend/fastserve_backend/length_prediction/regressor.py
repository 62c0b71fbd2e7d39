"""An MLP from an embedding to a length, trained a little with every job that ends."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .encoder import EMBEDDING_SIZE, Embedding

_HIDDEN = 128
# Elements of a unit vector are about 1/√384; this makes them about as large as layers expect.
_INPUT_SCALE = 8.0
_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 1e-2


class Regressor:
    """Predicts the median of the logarithm of the length: it minimises the mean |log error|."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same jobs teach the same
            self._net = nn.Sequential(
                nn.Linear(EMBEDDING_SIZE, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1)
            )
        self._optimizer = torch.optim.AdamW(
            self._net.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
        )

    @torch.inference_mode()
    def predict(self, embedding: Embedding) -> float:
        """A length in tokens, at least 1."""
        return max(1.0, math.exp(float(self._net(torch.from_numpy(embedding) * _INPUT_SCALE))))

    def train(self, embeddings: NDArray[np.float32], lengths: NDArray[np.float32]) -> None:
        """One step. Shapes [batch, 384] and [batch], in tokens, at least 1."""
        predicted = self._net(torch.from_numpy(embeddings) * _INPUT_SCALE).squeeze(1)
        loss = (predicted - torch.from_numpy(lengths).log()).abs().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """By name."""
        return {name: value.numpy().copy() for name, value in self._net.state_dict().items()}

    def load(self, weights: dict[str, NDArray[np.float32]]) -> None:
        self._net.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
