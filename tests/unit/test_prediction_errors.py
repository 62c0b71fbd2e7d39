"""Predictions with the errors of held-out ones: which job gets which error."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path

import pytest
from fastserve_bench.workload import TraceJob, load_lengths, poisson_trace

from benchmarks.paper.prediction_errors import PERFECT, PredictionErrors

MAX_MODEL_LEN = 2048
LENGTHS = load_lengths("alpaca")
ORDERED = sorted(output for _, output in LENGTHS)
SHIFT = 0.1


@pytest.fixture
def errors(tmp_path: Path) -> PredictionErrors:
    """Errors of 1,000 jobs: the shortest tenth is ranked a tenth too high, the longest a tenth too
    low."""
    rows = ["predicted_tokens,real_tokens"]
    for tokens in range(1000, 0, -1):
        wrong = 100 if tokens <= 100 else -100 if tokens > 900 else 0
        rows.append(f"{tokens + wrong},{tokens}")
    path = tmp_path / "errors.csv"
    path.write_text("\n".join(rows) + "\n")
    return PredictionErrors.read(path)


def at_rank(rank: float) -> int:
    return ORDERED[int(rank * len(ORDERED))]


def predict(errors: PredictionErrors, trace: list[TraceJob], seed: int = 0) -> list[int]:
    return errors.predict(trace, LENGTHS, seed, MAX_MODEL_LEN)


def of_output(tokens: int, count: int = 200) -> list[TraceJob]:
    return [TraceJob(0.0, 10, tokens)] * count


@pytest.mark.parametrize(("rank", "shift"), [(0.03, SHIFT), (0.5, 0.0), (0.97, -SHIFT)])
def test_a_job_gets_the_shift_in_rank_of_jobs_of_its_rank(
    errors: PredictionErrors, rank: float, shift: float
) -> None:
    tokens = at_rank(rank)
    least, most = (
        at_rank(side(ORDERED, tokens) / len(ORDERED) + shift)
        for side in (bisect_left, bisect_right)
    )
    predictions = predict(errors, of_output(tokens))
    assert least <= min(predictions) <= max(predictions) <= most


def test_errors_between_are_drawn_from_the_nearest_jobs(errors: PredictionErrors) -> None:
    tokens = at_rank(0.1)
    predictions = predict(errors, of_output(tokens))
    assert 0.2 < predictions.count(tokens) / len(predictions) < 0.8
    assert max(predictions) >= at_rank(0.09 + SHIFT)


def test_perfect_errors_are_none() -> None:
    trace = poisson_trace(LENGTHS, 1.0, 300, 0)
    assert predict(PERFECT, trace) == [job.output_tokens for job in trace]


def test_the_seed_decides_and_a_longer_trace_begins_alike(errors: PredictionErrors) -> None:
    trace = poisson_trace(LENGTHS, 1.0, 300, 0)
    assert predict(errors, trace) == predict(errors, trace)
    assert predict(errors, trace)[:100] == predict(errors, trace[:100])
    assert predict(errors, trace) != predict(errors, trace, seed=1)


def test_a_prediction_leaves_room_for_the_prompt(errors: PredictionErrors) -> None:
    assert predict(errors, [TraceJob(0.0, 2047, at_rank(0.5))]) == [1]
