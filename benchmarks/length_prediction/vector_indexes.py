"""Which library keeps the embeddings: USearch, faiss and hnswlib side by side.

    pip install faiss-cpu hnswlib
    python benchmarks/length_prediction/vector_indexes.py --instructions FILE --entries 50000

Vectors lie around real embeddings: those of the prompts in FILE (JSON lines as for
output_lengths.py), each with some noise. One thread, 20 neighbours. "Churn" removes the oldest
entry and adds one, as a full index does with every job, 5,000 times; recall is the share of the
true neighbours that is found, before and after that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import faiss
import hnswlib
import numpy as np
import torch
from fastserve_backend.length_prediction.encoder import EMBEDDING_SIZE, Encoder
from fastserve_backend.length_prediction.predictor import NUM_NEIGHBOURS
from instructions import read_instructions
from numpy.typing import NDArray
from usearch.index import Index

_QUERIES = 200
_REPLACED = 5_000
# Of each vector's length: as far from each other as prompts that ask for similar things.
_NOISE = 0.5
# The same graph for all: neighbours of a node, and candidates looked at when adding and searching.
_CONNECTIVITY, _EXPANSION_ADD, _EXPANSION_SEARCH = 16, 128, 64

Vectors = NDArray[np.float32]
Keys = NDArray[np.integer[Any]]


class Library(Protocol):
    """Keys are 0 to entries - 1; a full index replaces the vector of a key."""

    def add(self, key: int, vector: Vectors) -> None: ...
    def replace(self, key: int, vector: Vectors) -> None: ...
    def search(self, vector: Vectors) -> Keys: ...
    def save(self, path: str) -> None: ...
    def load(self, path: str) -> None: ...


class USearchGraph:
    def __init__(self, entries: int) -> None:
        self._index = Index(
            ndim=EMBEDDING_SIZE,
            metric="cos",
            dtype="f16",
            connectivity=_CONNECTIVITY,
            expansion_add=_EXPANSION_ADD,
            expansion_search=_EXPANSION_SEARCH,
        )

    def add(self, key: int, vector: Vectors) -> None:
        self._index.add(key, vector, threads=1)

    def replace(self, key: int, vector: Vectors) -> None:
        self._index.remove(key)
        self._index.add(key, vector, threads=1)

    def search(self, vector: Vectors) -> Keys:
        return self._index.search(vector, NUM_NEIGHBOURS, threads=1).keys

    def save(self, path: str) -> None:
        self._index.save(path)

    def load(self, path: str) -> None:
        self._index.load(path)


class HnswlibGraph:
    """``allow_replace_deleted`` takes the place of a removed vector, under a label of its own."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._index = hnswlib.Index("cosine", EMBEDDING_SIZE)
        self._index.init_index(
            entries, ef_construction=_EXPANSION_ADD, M=_CONNECTIVITY, allow_replace_deleted=True
        )
        self._prepare()

    def _prepare(self) -> None:
        self._index.set_ef(_EXPANSION_SEARCH)
        self._index.set_num_threads(1)
        self._label_of: dict[int, int] = {}

    def add(self, key: int, vector: Vectors) -> None:
        self._index.add_items(vector, key)

    def replace(self, key: int, vector: Vectors) -> None:
        label = self._label_of.get(key, key)
        self._index.mark_deleted(label)
        self._label_of[key] = label + self._entries
        self._index.add_items(vector, label + self._entries, replace_deleted=True)

    def search(self, vector: Vectors) -> Keys:
        keys: Keys = self._index.knn_query(vector, NUM_NEIGHBOURS)[0][0] % self._entries
        return keys

    def save(self, path: str) -> None:
        self._index.save_index(path)

    def load(self, path: str) -> None:
        self._index = hnswlib.Index("cosine", EMBEDDING_SIZE)
        self._index.load_index(path, self._entries, allow_replace_deleted=True)


class FaissFlat:
    """All vectors compared. faiss' HNSW cannot remove any."""

    def __init__(self, entries: int) -> None:
        faiss.omp_set_num_threads(1)
        self._index = faiss.IndexIDMap2(
            faiss.IndexScalarQuantizer(
                EMBEDDING_SIZE, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
            )
        )

    def add(self, key: int, vector: Vectors) -> None:
        self._index.add_with_ids(vector[None], np.array([key]))

    def replace(self, key: int, vector: Vectors) -> None:
        self._index.remove_ids(np.array([key]))
        self.add(key, vector)

    def search(self, vector: Vectors) -> Keys:
        keys: Keys = self._index.search(vector[None], NUM_NEIGHBOURS)[1][0]
        return keys

    def save(self, path: str) -> None:
        faiss.write_index(self._index, path)

    def load(self, path: str) -> None:
        self._index = faiss.read_index(path)


class NumpyScan:
    """No library: one matrix-vector product in float32."""

    def __init__(self, entries: int) -> None:
        self._vectors = np.zeros((entries, EMBEDDING_SIZE), dtype=np.float32)

    def add(self, key: int, vector: Vectors) -> None:
        self._vectors[key] = vector

    replace = add

    def search(self, vector: Vectors) -> Keys:
        return np.argpartition(self._vectors @ vector, -NUM_NEIGHBOURS)[-NUM_NEIGHBOURS:]

    def save(self, path: str) -> None:
        with open(path, "wb") as file:
            np.save(file, self._vectors)

    def load(self, path: str) -> None:
        self._vectors = np.load(path)


LIBRARIES: dict[str, Callable[[int], Library]] = {
    "usearch (HNSW, float16)": USearchGraph,
    "hnswlib (HNSW, float32)": HnswlibGraph,
    "faiss (all compared, float16)": FaissFlat,
    "numpy (all compared, float32)": NumpyScan,
}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--instructions", type=Path, required=True, metavar="FILE")
    options.add_argument("--entries", type=int, default=50_000, help="in the index (50000)")
    args = options.parse_args()
    torch.set_num_threads(1)
    vectors = _around(_real_embeddings(args.instructions), args.entries + _REPLACED + _QUERIES)
    print("| | query ms | add ms | churn ms | recall | after churn | file MB | save s | load s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, library in LIBRARIES.items():
        print(f"| {name} | {' | '.join(_measure(library, args.entries, vectors))} |", flush=True)


def _real_embeddings(path: Path) -> Vectors:
    encoder = Encoder()
    return np.stack([encoder.embed(one.prompt) for one in read_instructions(path)])


def _around(real: Vectors, count: int) -> Vectors:
    random = np.random.default_rng(0)
    noise = random.standard_normal((count, EMBEDDING_SIZE), dtype=np.float32)
    noise *= _NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
    vectors = real[random.integers(len(real), size=count)] + noise
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def _measure(library: Callable[[int], Library], entries: int, vectors: Vectors) -> list[str]:
    index = library(entries)
    first, second, queries = np.split(vectors, [entries, entries + _REPLACED])
    add_ms = median(_milliseconds(index.add, key, vector) for key, vector in enumerate(first))
    before = _recall(index, first, queries)
    churn_ms = median(
        _milliseconds(index.replace, key % entries, vector) for key, vector in enumerate(second)
    )
    first[np.arange(_REPLACED) % entries] = second
    after = _recall(index, first, queries)
    query_ms = median(_milliseconds(index.search, query) for query in queries)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "index")
        save_s = _milliseconds(index.save, path) / 1e3
        size_mb = os.path.getsize(path) / 1e6
        load_s = _milliseconds(library(entries).load, path) / 1e3
    times = [f"{value:.2f}" for value in (query_ms, add_ms, churn_ms)]
    return [
        *times,
        f"{before:.3f}",
        f"{after:.3f}",
        f"{size_mb:.0f}",
        f"{save_s:.2f}",
        f"{load_s:.2f}",
    ]


def _milliseconds(act: Callable[..., object], *arguments: object) -> float:
    """Of processor time, which other programs change little."""
    begin = time.thread_time()
    act(*arguments)
    return (time.thread_time() - begin) * 1e3


def _recall(index: Library, vectors: Vectors, queries: Vectors) -> float:
    shares = []
    for query in queries:
        true = np.argpartition(vectors @ query, -NUM_NEIGHBOURS)[-NUM_NEIGHBOURS:]
        shares.append(np.isin(true, index.search(query)).mean())
    return float(np.mean(shares))


if __name__ == "__main__":
    main()
