"""The bounded memory of past jobs, under random histories."""

from __future__ import annotations

import numpy as np
import pytest
from fastserve_backend.length_prediction.encoder import EMBEDDING_SIZE, Embedding
from fastserve_backend.length_prediction.past_jobs import PastJobs
from hypothesis import given, settings
from hypothesis import strategies as st


def embedding_of(seed: int) -> Embedding:
    """Random embeddings are nearly orthogonal."""
    vector = np.random.default_rng(seed).standard_normal(EMBEDDING_SIZE, dtype=np.float32)
    unit: Embedding = vector / np.linalg.norm(vector)
    return unit


@settings(max_examples=50)
@given(
    capacity=st.integers(1, 6),
    jobs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5000)), max_size=60),
)
def test_holds_the_prompts_seen_last_and_no_more(
    capacity: int, jobs: list[tuple[int, int]]
) -> None:
    past = PastJobs(capacity)
    model: dict[int, list[int]] = {}  # prompts in order of last sight, with their lengths
    for prompt, length in jobs:
        past.add(embedding_of(prompt), length)
        model[prompt] = [*model.pop(prompt, []), length]
        if len(model) > capacity:
            del model[next(iter(model))]
        assert len(past) == len(model) <= capacity
    for prompt in range(10):
        found = past.nearest(embedding_of(prompt), 1)
        known = len(found.similarities) > 0 and found.similarities[0] > 0.99
        assert known == (prompt in model)
        if prompt in model:
            assert min(model[prompt]) - 0.01 <= found.lengths[0] <= max(model[prompt]) + 0.01


def test_a_shared_prompt_follows_its_latest_jobs() -> None:
    past = PastJobs(4)
    for length in [10] * 50 + [100] * 50:
        past.add(embedding_of(1), length)
    assert len(past) == 1
    assert past.nearest(embedding_of(1), 1).lengths[0] == pytest.approx(100, rel=0.01)


def test_neighbours_are_the_true_ones_also_after_much_forgetting() -> None:
    past = PastJobs(300)
    for seed in range(900):
        past.add(embedding_of(seed), seed)
    kept = np.stack([embedding_of(seed) for seed in range(600, 900)])
    hits = 0
    for seed in range(5000, 5050):
        query = embedding_of(seed)
        true = {600 + int(index) for index in np.argsort(kept @ query)[-10:]}
        found = past.nearest(query, 10)
        assert (np.diff(found.similarities) <= 0).all()
        assert (found.lengths >= 600).all()
        hits += len(true & {int(length) for length in found.lengths})
    assert hits > 0.9 * 50 * 10


def test_a_smaller_capacity_forgets_the_oldest() -> None:
    past = PastJobs(8)
    for seed in range(8):
        past.add(embedding_of(seed), 100 + seed)
    past.add(embedding_of(0), 100)
    smaller = PastJobs.restored(past.saved(), 3)
    assert len(smaller) == 3
    assert {int(smaller.nearest(embedding_of(seed), 1).lengths[0]) for seed in (6, 7, 0)} == {
        106, 107, 100,
    }  # fmt: skip
    smaller.add(embedding_of(50), 50)
    assert len(smaller) == 3
    assert smaller.nearest(embedding_of(6), 1).similarities[0] < 0.9
