"""How long a job's output will be, from its prompt's words and the jobs before it.

ALISE (arXiv 2410.23537): the lengths of the most similar past prompts, weighted by similarity;
where none is similar, a regressor over the embedding. Here it is their weighted median instead of
the mean, which a few long answers among them would move.
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

# Chosen on a validation part; docs/length_prediction.md has the measurements.
NUM_NEIGHBOURS = 20
MIN_SIMILARITY = 0.84
# Similarities are raised to this power before they weigh lengths: they are all near each other.
_SHARPNESS = 8
# Fewer jobs say too little of those unlike them.
_MIN_JOBS = 32
# Past jobs that the regressor is trained on when one ends.
_BATCH = 32

_log = logging.getLogger(__name__)


class Prediction(NamedTuple):
    num_tokens: int | None
    """None: too little is known yet."""
    source: Literal["neighbours", "regressor", "cold"]


class LengthPredictor:
    """Not for several threads at once.

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
        """What was saved in ``directory``, or, with the reason logged, an empty one."""
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
            # Intact, but of another release of the index's library, for example.
            raise SavedStateError(f"cannot be used ({error})") from error

    def save(self, directory: Path) -> None:
        """Replaces what is there, at once: no reader and no crash sees half of it.

        Raises OSError.
        """
        state = SavedState(self.jobs.saved(), self.regressor.weights())
        write_state(directory, state, self._encoder.identity)

    def __len__(self) -> int:
        """Prompts that are remembered."""
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
        """A job with this prompt ended by itself with this many output tokens, at least 1."""
        self.jobs.add(embedding, num_tokens)
        self.regressor.train(*self.jobs.sample(_BATCH, self._random))


def median_length(neighbours: Neighbours) -> float:
    """The length at which those of half the weight are shorter; one of the neighbours' own."""
    weights = np.maximum(neighbours.similarities, 0.0) ** _SHARPNESS
    order = np.argsort(neighbours.lengths)
    cumulative = np.cumsum(weights[order])
    middle = np.searchsorted(cumulative, cumulative[-1] / 2)
    return float(neighbours.lengths[order[middle]])


def _tokens(length: float) -> int:
    return max(1, round(length))
