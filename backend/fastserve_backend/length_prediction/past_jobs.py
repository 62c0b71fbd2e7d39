"""Past jobs: the embeddings of their prompts, and the lengths of their outputs."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastserve_backend.length_prediction.encoder import Embedding
from fastserve_backend.length_prediction.vector_index import VectorIndex

# Prompts that are more similar share one entry. Otherwise a template that thousands of jobs use
# would drive out all other entries.
SAME_PROMPT_SIMILARITY = 0.995
# The length of a shared entry is about the mean over the last so many jobs.
MAX_WEIGHT = 8

Lengths = NDArray[np.float32]


class Neighbours(NamedTuple):
    similarities: NDArray[np.float32]
    """Shape [neighbours], descending."""
    lengths: Lengths
    """Shape [neighbours], in tokens."""


class SavedJobs(NamedTuple):
    """The whole state of `PastJobs`."""

    vectors: bytes
    """From `VectorIndex.to_bytes`; its keys are the slots."""
    lengths: Lengths
    """Shape [slots], in tokens: the mean over each slot's jobs."""
    weights: NDArray[np.int32]
    """Shape [slots]: the number of each slot's jobs, at most MAX_WEIGHT."""
    order: NDArray[np.int32]
    """Shape [slots]: the slots from the least to the most recently seen."""


class PastJobs:
    """At most ``capacity`` prompts, each in a slot. The least recently seen is forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._index = VectorIndex()
        self._lengths = np.zeros(capacity, dtype=np.float32)
        self._weights = np.zeros(capacity, dtype=np.int32)
        self._order: OrderedDict[int, None] = OrderedDict()  # slots 0 to len - 1, oldest first

    @classmethod
    def restored(cls, saved: SavedJobs, capacity: int) -> PastJobs:
        """The saved state, without its oldest jobs where ``capacity`` is smaller now."""
        jobs = cls(capacity)
        index = VectorIndex(saved.vectors)
        if len(index) > capacity:
            slots = saved.order[-capacity:]
            for embedding, slot in zip(index.embeddings(slots), slots, strict=True):
                jobs._insert(embedding, saved.lengths[slot], saved.weights[slot])
            return jobs
        jobs._index = index
        jobs._lengths[: len(index)] = saved.lengths
        jobs._weights[: len(index)] = saved.weights
        jobs._order = OrderedDict.fromkeys(saved.order.tolist())
        return jobs

    def saved(self) -> SavedJobs:
        return SavedJobs(
            self._index.to_bytes(),
            self._lengths[: len(self)].copy(),
            self._weights[: len(self)].copy(),
            np.fromiter(self._order, dtype=np.int32, count=len(self)),
        )

    def __len__(self) -> int:
        return len(self._order)

    def nearest(self, embedding: Embedding, count: int) -> Neighbours:
        slots, similarities = self._index.nearest(embedding, count)
        return Neighbours(similarities, self._lengths[slots])

    def add(self, embedding: Embedding, num_tokens: int) -> None:
        slots, similarities = self._index.nearest(embedding, 1)
        if len(slots) and similarities[0] >= SAME_PROMPT_SIMILARITY:
            slot = int(slots[0])
            self._weights[slot] = min(self._weights[slot] + 1, MAX_WEIGHT)
            self._lengths[slot] += (num_tokens - self._lengths[slot]) / self._weights[slot]
            self._order.move_to_end(slot)
        else:
            self._insert(embedding, num_tokens, 1)

    def sample(
        self, count: int, random: np.random.Generator
    ) -> tuple[NDArray[np.float32], Lengths]:
        """Embeddings, shape [count, 384], and lengths, shape [count], drawn with replacement."""
        slots = random.integers(len(self), size=count)
        return self._index.embeddings(slots), self._lengths[slots]

    def _insert(self, embedding: Embedding, length: float, weight: int) -> None:
        slot = len(self)
        if slot == self._capacity:
            slot, _ = self._order.popitem(last=False)
            self._index.remove(slot)
        self._index.add(slot, embedding)
        self._lengths[slot] = length
        self._weights[slot] = weight
        self._order[slot] = None
