"""The nearest of many embeddings: an HNSW graph (Malkov and Yashunin 2018), USearch's.

docs/length_prediction.md says why this library, beside faiss and hnswlib.
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
        """Empty, or what `to_bytes` gave: the bytes must be trusted, the library checks little."""
        self._index = Index(ndim=EMBEDDING_SIZE, metric="cos", dtype="f16")
        if saved is not None:
            self._index.load(saved)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, key: int, embedding: Embedding) -> None:
        """The key must not be there."""
        self._index.add(key, embedding, threads=_ONE_THREAD)

    def remove(self, key: int) -> None:
        self._index.remove(key)

    def nearest(
        self, embedding: Embedding, count: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Keys of at most ``count`` neighbours and their similarities, the best first."""
        matches = self._index.search(embedding, count, threads=_ONE_THREAD)
        return matches.keys, 1.0 - matches.distances

    def embeddings(self, keys: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Shape [keys, 384]."""
        found = self._index.get(keys, dtype="f32")
        return np.stack(cast(tuple[NDArray[np.float32], ...], found))

    def to_bytes(self) -> bytes:
        return bytes(cast(bytearray, self._index.save()))
