"""An engine that predicts lengths learns from its jobs, and its predictor harms none."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.length_prediction import client as client_module
from fastserve_backend.length_prediction.job_predictions import JobPredictions
from fastserve_backend.length_prediction.saved_state import FILE_NAME
from live_engine import small_engine
from started_processes import StartedProcesses, noting_processes
from waiting import PREDICTOR_LOAD_S, wait_for

# Long enough that predictions come while they run.
SHORT = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
LONG = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
PROMPTS = ["Tell me a joke.", "List all kings of Egypt.", "Translate this poem.", "Sum 2 and 3."]
EACH = [SHORT, LONG, SHORT, LONG]


@pytest.fixture(scope="module")
def started() -> Iterator[StartedProcesses]:
    with noting_processes() as noted:
        yield noted


@pytest.fixture(scope="module")
def predicting_engine(
    checkpoint: Path,
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
    started: StartedProcesses,
) -> Iterator[LLM]:
    """An engine whose predictor finds a damaged file of an earlier start, which must not matter."""
    directory = tmp_path_factory.mktemp("lengths")
    (directory / FILE_NAME).write_bytes(b"garbage" * 100)
    with small_engine(
        checkpoint, tokenizer, policy="speculative", length_prediction_dir=str(directory)
    ) as llm:
        yield llm
        assert llm.engine.drain(PREDICTOR_LOAD_S)
        assert not predictions_of(llm)._unfinished
        assert all_counted(llm)


@pytest.fixture
def predicting(predicting_engine: LLM) -> LLM:
    """The engine, whose predictor has loaded. An earlier test may have ended the one before."""
    client = predictions_of(predicting_engine)._client
    wait_for(lambda: client.is_loaded, PREDICTOR_LOAD_S)
    return predicting_engine


def predictions_of(llm: LLM) -> JobPredictions:
    assert llm.engine.predictions is not None
    return llm.engine.predictions


def newest_predictor(started: StartedProcesses) -> psutil.Process:
    return started.of("fastserve_backend.length_prediction")[-1]


def all_counted(llm: LLM) -> bool:
    """Whether every ended job counts once as predicted or as fallen back."""
    counters = predictions_of(llm).counters
    assert set(counters.fallbacks) <= {"cold", "down", "slow"}
    counted = counters.predictions.total() + counters.fallbacks.total()
    return counted == llm.engine.counters.finished.total()


def answers(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, EACH, progress=False)]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The answers of an engine without prediction."""
    assert llm.engine.predictions is None
    return answers(llm)


def test_lengths_are_learned_from_jobs_and_then_predicted(
    predicting: LLM, expected: list[list[int]]
) -> None:
    predictions = predictions_of(predicting)
    assert answers(predicting) == expected
    wait_for(lambda: predictions.num_entries >= len(PROMPTS), PREDICTOR_LOAD_S)

    def predicted_from_neighbours() -> bool:
        assert answers(predicting) == expected
        return predictions.counters.predictions["neighbours"] > 0

    wait_for(predicted_from_neighbours, PREDICTOR_LOAD_S)
    counters = predictions.counters
    assert counters.real_tokens > 0
    # The same prompts have had the same lengths each time.
    assert counters.predicted_tokens == pytest.approx(counters.real_tokens, rel=0.3)
    errors = counters.relative_error.take()
    assert sum(counters.latency.take().counts) == counters.predictions.total()
    assert sum(errors.counts) <= counters.predictions.total()


def test_a_job_that_was_cut_off_teaches_nothing(
    predicting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = predictions_of(predicting)._client
    lessons: list[int | None] = []
    tell_end = client.tell_end

    def noting(number: int, num_tokens: int | None) -> None:
        lessons.append(num_tokens)
        tell_end(number, num_tokens)

    monkeypatch.setattr(client, "tell_end", noting)
    cut_off = SamplingParams(min_tokens=2, max_tokens=2, temperature=0)
    predicting.generate("Who was Ramses?", cut_off, progress=False)
    predicting.generate("Name five rivers.", SHORT, progress=False)
    assert lessons == [None, SHORT.max_tokens]


def test_a_killed_predictor_costs_no_job_anything(
    predicting: LLM,
    started: StartedProcesses,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predictions = predictions_of(predicting)
    down_before = predictions.counters.fallbacks["down"]
    first = newest_predictor(started)
    with monkeypatch.context() as patch:
        patch.setattr(predictions._client, "is_needed", lambda: False)  # the next one waits
        first.kill()
        wait_for(lambda: not predictions._client.is_loaded)
        assert answers(predicting) == expected
        assert predictions.counters.fallbacks["down"] == down_before + len(PROMPTS)
    predictions._client.start()
    wait_for(lambda: predictions._client.is_loaded, PREDICTOR_LOAD_S)
    assert newest_predictor(started) != first
    wait_for(lambda: all_counted(predicting))


def test_a_stopped_predictor_costs_no_job_anything(
    predicting: LLM,
    started: StartedProcesses,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predictions = predictions_of(predicting)
    slow_before = predictions.counters.fallbacks["slow"]
    stopped = newest_predictor(started)
    stopped.send_signal(signal.SIGSTOP)
    assert answers(predicting) == expected
    assert predictions.counters.fallbacks["slow"] == slow_before + len(PROMPTS)
    # There are far more jobs than pending questions allowed; the rest count as "slow" unasked.
    monkeypatch.setattr(client_module, "MAX_UNANSWERED", len(PROMPTS) + 1)
    assert answers(predicting) == expected
    assert predictions.counters.fallbacks["slow"] == slow_before + 2 * len(PROMPTS)
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.5)
    wait_for(lambda: not stopped.is_running(), PREDICTOR_LOAD_S)
    wait_for(lambda: all_counted(predicting))
