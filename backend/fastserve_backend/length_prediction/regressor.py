"""An MLP that maps an embedding to a length. Each job that ends trains it a little."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fastserve_backend.length_prediction.encoder import EMBEDDING_SIZE, Embedding

_HIDDEN = 128
# Elements of a unit vector are about 1/√384; scaled, they are about as large as layers expect.
_INPUT_SCALE = 8.0
# Small, because there is a step for each job, and each job is seen many times.
_LEARNING_RATE = 3e-4
_WEIGHT_DECAY = 1e-2
_FIRST_GUESS_TOKENS = 64.0
_MAX_LOG_LENGTH = math.log(1e6)  # above any output; beyond e^709 exp overflows


class Regressor:
    """Predicts the median of the logarithm of the length: it minimises the mean |log error|."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same jobs always give the same weights
            output = nn.Linear(_HIDDEN, 1)
            self._net = nn.Sequential(nn.Linear(EMBEDDING_SIZE, _HIDDEN), nn.ReLU(), output)
        nn.init.constant_(output.bias, math.log(_FIRST_GUESS_TOKENS))
        self._optimizer = torch.optim.AdamW(
            self._net.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
        )

    @torch.inference_mode()
    def predict(self, embedding: Embedding) -> float:
        """A length in tokens, at least 1."""
        log_length = float(self._net(torch.from_numpy(embedding) * _INPUT_SCALE))
        return math.exp(min(max(log_length, 0.0), _MAX_LOG_LENGTH))

    def train(self, embeddings: NDArray[np.float32], lengths: NDArray[np.float32]) -> None:
        """One training step. Shapes [batch, 384] and [batch]; lengths are in tokens, ≥ 1."""
        predicted = self._net(torch.from_numpy(embeddings) * _INPUT_SCALE).squeeze(1)
        loss = (predicted - torch.from_numpy(lengths).log()).abs().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Tensors by name."""
        return {name: value.numpy().copy() for name, value in self._net.state_dict().items()}

    def load(self, weights: dict[str, NDArray[np.float32]]) -> None:
        self._net.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
