"""Predictions that are as wrong as held-out ones: which job gets which error."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from fastserve_client.workload import TraceJob, load_lengths, poisson_trace

PAPER = Path(__file__).parents[2] / "benchmarks" / "paper"
MAX_MODEL_LEN = 2048
LENGTHS = load_lengths("alpaca")


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of 1,000 jobs: the shortest tenth is guessed twice as long, the longest half as long."""
    monkeypatch.syspath_prepend(PAPER)
    rows = ["predicted_tokens,real_tokens"]
    for tokens in range(1000, 0, -1):
        predicted = 2 * tokens if tokens <= 100 else tokens // 2 if tokens > 900 else tokens
        rows.append(f"{predicted},{tokens}")
    path = tmp_path / "errors.csv"
    path.write_text("\n".join(rows) + "\n")
    return importlib.import_module("prediction_errors").PredictionErrors.read(path)


def ratios(errors: Any, trace: list[TraceJob], seed: int = 0) -> list[float]:
    predictions = errors.predict(trace, LENGTHS, seed, MAX_MODEL_LEN)
    return [
        predicted / job.output_tokens for predicted, job in zip(predictions, trace, strict=True)
    ]


def of_output(tokens: int, count: int = 200) -> list[TraceJob]:
    return [TraceJob(0.0, 10, tokens)] * count


def test_a_job_gets_the_error_of_jobs_of_its_rank_not_of_its_length(errors: Any) -> None:
    ranked = sorted(output for _, output in LENGTHS)
    at = {share: ranked[int(share * len(ranked))] for share in (0.03, 0.5, 0.99)}
    assert at[0.99] < 900  # by length, its errors would be 1
    assert set(ratios(errors, of_output(at[0.03]))) == {2.0}
    assert set(ratios(errors, of_output(at[0.5]))) == {1.0}
    assert ratios(errors, of_output(at[0.99])) == pytest.approx([0.5] * 200, abs=0.01)


def test_errors_between_are_drawn_from_the_nearest_jobs(errors: Any) -> None:
    ranked = sorted(output for _, output in LENGTHS)
    drawn = ratios(errors, of_output(ranked[int(0.1 * len(ranked))]))
    assert {round(ratio) for ratio in drawn} == {1, 2}


def test_jobs_as_long_as_one_another_have_all_ranks_that_they_hold(errors: Any) -> None:
    trace = [TraceJob(0.0, 10, 100)] * 400
    predictions = errors.predict(trace, [(10, 100)] * 50, 0, MAX_MODEL_LEN)
    shares = [predictions.count(tokens) / 400 for tokens in (200, 100, 50)]
    assert shares == pytest.approx([0.1, 0.8, 0.1], abs=0.05)


def test_a_scale_multiplies_the_logarithm_of_each_error(errors: Any) -> None:
    trace = poisson_trace(LENGTHS, 1.0, 300, 0)
    perfect, once, twice = (ratios(errors.scaled(scale), trace) for scale in (0, 1, 2))
    assert set(perfect) == {1.0}
    assert min(once) < 0.6
    assert max(once) == 2.0
    short = [i for i, ratio in enumerate(once) if ratio == 2.0]
    assert [twice[i] for i in short] == [4.0] * len(short)
    assert errors.scaled(2).factor(0.95) == pytest.approx(errors.factor(0.95) ** 2)


def test_the_seed_decides_and_a_longer_trace_begins_alike(errors: Any) -> None:
    trace = poisson_trace(LENGTHS, 1.0, 300, 0)
    assert ratios(errors, trace) == ratios(errors, trace)
    assert ratios(errors, trace)[:100] == ratios(errors, trace[:100])
    assert ratios(errors, trace) != ratios(errors, trace, seed=1)


def test_a_prediction_leaves_room_for_the_prompt_and_is_a_token_at_least(errors: Any) -> None:
    trace = [TraceJob(0.0, 2000, 3), TraceJob(0.0, 10, max(output for _, output in LENGTHS))]
    most, least = errors.scaled(10).predict(trace, LENGTHS, 0, MAX_MODEL_LEN)
    assert most == 48
    assert least == 1
