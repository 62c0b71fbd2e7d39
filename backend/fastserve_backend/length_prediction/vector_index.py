"""Finds the nearest of many embeddings, with USearch's HNSW graph (Malkov and Yashunin 2018).

docs/length_prediction.md compares it with faiss and hnswlib.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from fastserve_backend.length_prediction.encoder import EMBEDDING_SIZE, Embedding

_ONE_THREAD = 1


class VectorIndex:
    """Embeddings by key, kept in float16. Similarity is the cosine."""

    def __init__(self, saved: bytes | None = None) -> None:
        """An empty index, or the one that `to_bytes` saved. The library checks little, so the bytes
        must be trusted."""
        self._index = Index(ndim=EMBEDDING_SIZE, metric="cos", dtype="f16")
        if saved is not None:
            self._index.load(saved)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, key: int, embedding: Embedding) -> None:
        """Add an embedding under a new key."""
        self._index.add(key, embedding, threads=_ONE_THREAD)

    def remove(self, key: int) -> None:
        self._index.remove(key)

    def nearest(
        self, embedding: Embedding, count: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Keys and similarities of at most ``count`` neighbours, the best first."""
        matches = self._index.search(embedding, count, threads=_ONE_THREAD)
        return matches.keys, 1.0 - matches.distances

    def embeddings(self, keys: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Shape [keys, 384]."""
        found = self._index.get(keys, dtype="f32")
        return np.stack(cast(tuple[NDArray[np.float32], ...], found))

    def to_bytes(self) -> bytes:
        return bytes(cast(bytearray, self._index.save()))
