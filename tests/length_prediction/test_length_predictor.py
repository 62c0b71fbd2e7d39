"""Predicting, learning, saving."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from fastserve_backend.length_prediction.encoder import EMBEDDING_SIZE, Embedding, Encoder
from fastserve_backend.length_prediction.predictor import MIN_SIMILARITY, LengthPredictor
from fastserve_backend.length_prediction.saved_state import FILE_NAME, SavedState, write_state
from hypothesis import given, settings
from hypothesis import strategies as st
from log_records import messages_of

POEMS = [f"Write a poem about {subject}." for subject in ("the sea", "a cat", "rain", "my car")]
SUMS = [f"What is {a} plus {b}? Answer with the number." for a, b in ((3, 4), (9, 12), (5, 88))]


def unit(vector: Embedding) -> Embedding:
    scaled: Embedding = (vector / np.linalg.norm(vector)).astype(np.float32)
    return scaled


def random_embeddings(random: np.random.Generator, count: int) -> list[Embedding]:
    return [unit(row) for row in random.standard_normal((count, EMBEDDING_SIZE))]


@pytest.fixture
def taught(encoder: Encoder) -> LengthPredictor:
    predictor = LengthPredictor(encoder, 100)
    for prompt in POEMS:
        predictor.learn(predictor.embed(prompt), 200)
    for prompt in SUMS:
        predictor.learn(predictor.embed(prompt), 5)
    return predictor


def test_knows_nothing_at_first(encoder: Encoder) -> None:
    predictor = LengthPredictor(encoder, 10)
    assert len(predictor) == 0
    assert predictor.predict(predictor.embed("Hello")) == (None, "cold")


def test_predicts_what_similar_prompts_came_to(taught: LengthPredictor) -> None:
    assert taught.predict(taught.embed("Write a poem about the moon.")) == (200, "neighbours")
    sum_ = taught.predict(taught.embed("What is 7 plus 21? Answer with the number."))
    assert sum_ == (5, "neighbours")


def test_asks_the_regressor_where_no_prompt_is_similar(
    encoder: Encoder, random: np.random.Generator
) -> None:
    predictor = LengthPredictor(encoder, 500)
    # Outputs are long where the first number of an embedding is positive.
    for embedding in random_embeddings(random, 250):
        embedding[0] = np.copysign(1.0, embedding[0])
        predictor.learn(unit(embedding), 400 if embedding[0] > 0 else 10)
    long, short = (np.eye(EMBEDDING_SIZE, dtype=np.float32)[0] * sign for sign in (0.5, -0.5))
    noise = unit(random.standard_normal(EMBEDDING_SIZE)) * np.float32(0.8)
    assert predictor.jobs.nearest(unit(long + noise), 1).similarities[0] < MIN_SIMILARITY
    predicted_long = predictor.predict(unit(long + noise))
    predicted_short = predictor.predict(unit(short + noise))
    assert predicted_long.source == predicted_short.source == "regressor"
    assert predicted_long.num_tokens is not None
    assert predicted_short.num_tokens is not None
    assert predicted_long.num_tokens > 3 * predicted_short.num_tokens


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=40), seed=st.integers(0, 2**16)
)
def test_a_prediction_is_within_what_was_learned(
    encoder: Encoder, lengths: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    predictor = LengthPredictor(encoder, 16)
    centre = random.standard_normal(EMBEDDING_SIZE)
    for length in lengths:
        near = unit(centre + 0.2 * random.standard_normal(EMBEDDING_SIZE))
        predictor.learn(near, length)
        assert len(predictor) <= 16
    prediction = predictor.predict(unit(centre))
    assert prediction.source == "neighbours"
    assert prediction.num_tokens is not None
    assert min(lengths) <= prediction.num_tokens <= max(lengths)


def test_what_was_saved_predicts_the_same(
    encoder: Encoder, random: np.random.Generator, tmp_path: Path
) -> None:
    predictor = LengthPredictor(encoder, 50)
    for index, embedding in enumerate(random_embeddings(random, 80)):
        predictor.learn(embedding, 1 + 7 * index)
    directory = tmp_path / "of" / "a model"
    predictor.save(directory)
    again = LengthPredictor.open(directory, encoder, 50)
    assert len(again) == len(predictor) == 50
    strangers = random_embeddings(random, 20)
    for embedding in strangers + [unit(one + 0.1 * strangers[0]) for one in strangers]:
        assert again.predict(embedding) == predictor.predict(embedding)
    for embedding in random_embeddings(random, 30):  # it goes on learning
        again.learn(embedding, 3)
    assert len(again) == 50


def test_saving_again_replaces_the_file_and_leaves_nothing_else(
    taught: LengthPredictor, encoder: Encoder, tmp_path: Path
) -> None:
    taught.save(tmp_path)
    taught.learn(taught.embed("Explain how rain forms."), 77)
    taught.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert len(LengthPredictor.open(tmp_path, encoder, 100)) == len(taught)


def test_nothing_saved_is_no_fault(
    encoder: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(LengthPredictor.open(tmp_path / "none", encoder, 10)) == 0
    assert len(LengthPredictor.open(None, encoder, 10)) == 0
    assert messages_of(caplog, "fastserve_backend.length_prediction") == []


@pytest.mark.parametrize("where", [0.0, 0.001, 0.02, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("harm", ["cut", "flipped"])
def test_a_damaged_file_is_refused_and_begun_anew(
    taught: LengthPredictor, encoder: Encoder, tmp_path: Path, harm: str, where: float,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    taught.save(tmp_path)
    file = tmp_path / FILE_NAME
    data = bytearray(file.read_bytes())
    at = int(where * len(data))
    if harm == "cut":
        del data[at:]
    else:
        data[at] ^= 0x10
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        opened = LengthPredictor.open(tmp_path, encoder, 100)
    assert len(opened) == 0
    assert opened.predict(opened.embed(POEMS[0])).source == "cold"
    assert "learned anew" in caplog.text
    assert str(file) in caplog.text
    opened.learn(opened.embed(POEMS[0]), 9)
    opened.save(tmp_path)
    assert len(LengthPredictor.open(tmp_path, encoder, 100)) == 1


def test_another_encoders_file_is_refused(
    taught: LengthPredictor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taught.save(tmp_path)
    assert len(LengthPredictor.open(tmp_path, Encoder(num_layers=1), 100)) == 0
    assert "has encoder" in caplog.text


def test_an_index_of_another_release_of_its_library_is_refused(
    taught: LengthPredictor, encoder: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = taught.jobs.saved()
    vectors = bytearray(jobs.vectors)
    vectors[vectors.index(b"usearch") + len(b"usearch")] += 1  # its major version
    state = SavedState(jobs._replace(vectors=bytes(vectors)), taught.regressor.weights())
    write_state(tmp_path, state, encoder.identity)
    assert len(LengthPredictor.open(tmp_path, encoder, 100)) == 0
    assert "cannot be used" in caplog.text


def test_what_a_killed_process_was_writing_is_removed(
    taught: LengthPredictor, tmp_path: Path
) -> None:
    old, new = tmp_path / f"{FILE_NAME}.old.tmp", tmp_path / f"{FILE_NAME}.new.tmp"
    other = tmp_path / "other.tmp"
    for file in (old, new, other):
        file.write_bytes(b"half a file")
        os.utime(file, (0, 0))
    os.utime(new)
    taught.save(tmp_path)
    assert not old.exists()
    assert new.exists(), "it may be another server's, which saves at this moment"
    assert other.exists(), "the directory is the user's"
    assert (tmp_path / FILE_NAME).exists()


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    taught: LengthPredictor, encoder: Encoder, tmp_path: Path
) -> None:
    taught.save(tmp_path)
    taken = tmp_path / "taken"
    taken.write_text("a file where a directory should be")
    with pytest.raises(OSError, match="taken"):
        taught.save(taken)
    assert len(LengthPredictor.open(tmp_path, encoder, 100)) == len(taught)
