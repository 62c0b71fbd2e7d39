"""Predicts a job's output length from its prompt and from past jobs.

As in ALISE (arXiv 2410.23537), the lengths of the most similar past prompts, weighted by
similarity, give the prediction. If none is similar, a regressor over the embedding does. ALISE
takes the weighted mean, this the weighted median: a few long answers move a mean far.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fastserve_backend.length_prediction.encoder import Embedding, Encoder
from fastserve_backend.length_prediction.past_jobs import Neighbours, PastJobs
from fastserve_backend.length_prediction.regressor import Regressor
from fastserve_backend.length_prediction.saved_state import (
    FILE_NAME,
    SavedState,
    SavedStateError,
    read_state,
    write_state,
)

# Chosen on validation data; docs/length_prediction.md has the measurements.
NUM_NEIGHBOURS = 20
MIN_SIMILARITY = 0.84
# Weights are similarities to this power, because similarities are all near each other.
_SHARPNESS = 8
# Fewer jobs teach the regressor too little about prompts that are unlike theirs.
_MIN_JOBS = 32
# Past jobs in the regressor's training step after each job.
_BATCH = 32

_log = logging.getLogger(__name__)


class Prediction(NamedTuple):
    num_tokens: int | None
    """Output tokens; None: too little is known yet."""
    source: Literal["neighbours", "regressor", "cold"]


class LengthPredictor:
    """Only one thread may use it.

    Args:
        capacity: most past prompts that are remembered.
    """

    def __init__(self, encoder: Encoder, capacity: int) -> None:
        self._encoder = encoder
        self.jobs = PastJobs(capacity)
        self.regressor = Regressor()
        self._random = np.random.default_rng(0)

    @classmethod
    def open(cls, directory: Path | None, encoder: Encoder, capacity: int) -> LengthPredictor:
        """The predictor saved in ``directory``; if it cannot be used, the log says why, and the new
        one is empty."""
        predictor = cls(encoder, capacity)
        if directory is None:
            return predictor
        try:
            state = read_state(directory, encoder.identity)
            if state is not None:
                predictor._restore(state, capacity)
        except SavedStateError as error:
            _log.warning("%s %s; lengths are learned anew", directory / FILE_NAME, error)
            return cls(encoder, capacity)
        return predictor

    def _restore(self, state: SavedState, capacity: int) -> None:
        try:
            self.jobs = PastJobs.restored(state.jobs, capacity)
            self.regressor.load(state.regressor)
        except (RuntimeError, ValueError, KeyError) as error:
            # Intact, but for example from another release of the index's library.
            raise SavedStateError(f"cannot be used ({error})") from error

    def save(self, directory: Path) -> None:
        """Replace the saved state atomically: no reader and no crash sees half of it.

        Raises OSError.
        """
        state = SavedState(self.jobs.saved(), self.regressor.weights())
        write_state(directory, state, self._encoder.identity)

    def __len__(self) -> int:
        """Number of prompts that are remembered."""
        return len(self.jobs)

    def embed(self, text: str) -> Embedding:
        return self._encoder.embed(text)

    def predict(self, embedding: Embedding) -> Prediction:
        neighbours = self.jobs.nearest(embedding, NUM_NEIGHBOURS)
        if len(self) and neighbours.similarities[0] >= MIN_SIMILARITY:
            return Prediction(_tokens(median_length(neighbours)), "neighbours")
        if len(self) >= _MIN_JOBS:
            return Prediction(_tokens(self.regressor.predict(embedding)), "regressor")
        return Prediction(None, "cold")

    def learn(self, embedding: Embedding, num_tokens: int) -> None:
        """Learn that the model ended a job with this prompt after ``num_tokens`` ≥ 1 tokens."""
        self.jobs.add(embedding, num_tokens)
        self.regressor.train(*self.jobs.sample(_BATCH, self._random))


def median_length(neighbours: Neighbours) -> float:
    """The weighted median, which is the length of one of the neighbours."""
    weights = np.maximum(neighbours.similarities, 0.0) ** _SHARPNESS
    order = np.argsort(neighbours.lengths)
    cumulative = np.cumsum(weights[order])
    middle = np.searchsorted(cumulative, cumulative[-1] / 2)
    return float(neighbours.lengths[order[middle]])


def _tokens(length: float) -> int:
    return max(1, round(length))
