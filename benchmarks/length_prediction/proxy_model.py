"""A proxy model: a pretrained encoder with a regression head, trained on prompts and lengths.

What ALISE compares with (as S3, Jin et al. 2023): it is trained once, beforehand, and reads the
prompt as a whole.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import torch
from fastserve_backend.length_prediction.encoder import EMBEDDING_SIZE, model_directory
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

MAX_EPOCHS = 3
_MAX_TOKENS = 256
_BATCH = 32
_SLICES_OF = 8  # batches whose prompts are sorted by length, so that little is padded
_HEAD_LEARNING_RATE = 1e-3
_ENCODER_LEARNING_RATE = 1e-4


class ProxyModel:
    """all-MiniLM-L6-v2, mean pooling and an MLP, fine-tuned as a whole; predicts the median of the
    log length.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        directory = model_directory()
        self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._encoder = AutoModel.from_pretrained(directory, local_files_only=True)
        self._output = nn.Linear(128, 1)
        self._head = nn.Sequential(nn.Linear(EMBEDDING_SIZE, 128), nn.ReLU(), self._output)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": self._encoder.parameters(), "lr": _ENCODER_LEARNING_RATE},
                {"params": self._head.parameters(), "lr": _HEAD_LEARNING_RATE},
            ]
        )

    def train(self, prompts: Sequence[str], lengths: Sequence[int], limit_s: float) -> float:
        """Returns the epochs that the time was enough for, at most MAX_EPOCHS."""
        with torch.no_grad():
            self._output.bias.fill_(sum(map(math.log, lengths)) / len(lengths))
        self._encoder.train()
        end_s = time.monotonic() + limit_s
        seen = 0
        for epoch in range(MAX_EPOCHS):
            for batch in _batches(prompts, random.Random(epoch)):
                if time.monotonic() > end_s:
                    break
                wanted = torch.tensor([math.log(lengths[index]) for index in batch])
                predicted = self._log_lengths([prompts[index] for index in batch])
                loss = (predicted - wanted).abs().mean()
                self._optimizer.zero_grad()
                loss.backward()
                self._optimizer.step()
                seen += len(batch)
        self._encoder.eval()
        return seen / len(prompts)

    @torch.inference_mode()
    def predict(self, prompt: str) -> float:
        """In tokens, at least 1."""
        return max(1.0, math.exp(float(self._log_lengths([prompt]))))

    def _log_lengths(self, prompts: Sequence[str]) -> Tensor:
        inputs = self._tokenizer(
            list(prompts),
            padding=True,
            truncation=True,
            max_length=_MAX_TOKENS,
            return_tensors="pt",
        )
        hidden = self._encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(2)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        log_lengths: Tensor = self._head(pooled).squeeze(1)
        return log_lengths


def _batches(prompts: Sequence[str], source: random.Random) -> list[list[int]]:
    """Indices of all prompts, those of a batch of about the same length, in random order."""
    order = source.sample(range(len(prompts)), len(prompts))
    batches: list[list[int]] = []
    for begin in range(0, len(order), _BATCH * _SLICES_OF):
        some = sorted(order[begin : begin + _BATCH * _SLICES_OF], key=lambda one: len(prompts[one]))
        batches += [some[first : first + _BATCH] for first in range(0, len(some), _BATCH)]
    source.shuffle(batches)
    return batches
