"""A rank launches a step before the previous step's tokens have left it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import job_steps
import numpy as np
import pytest
import torch
from cpu_kernels import same_kernels_afterwards
from emulated_gpu import DEVICE, emulated_gpu
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.model_part import ALONE
from fastserve_backend.rank_protocol.messages import FromRank, StageDone, Step, StepResult
from fastserve_backend.worker.model_runner import LastTokens, LaunchedStep, ModelRunner, Stopwatch
from fastserve_backend.worker.step_inputs import StepLimits
from fastserve_backend.worker.worker import AnsweringThread
from fastserve_kernels import ops
from job_steps import run_turns
from test_gpu_steps import MODELS, model_config
from waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("forked_ranks")

CPU = torch.device("cpu")
ONE_LAYER = MODELS["opt"] | {"num_hidden_layers": 1}


@pytest.fixture
def make_runner(tmp_path: Path) -> Iterator[Callable[[str], ModelRunner]]:
    config = model_config(tmp_path, ONE_LAYER)
    shape = (job_steps.NUM_BLOCKS, 1, 2, config.num_kv_heads, job_steps.BLOCK_SIZE, config.head_dim)
    limits = StepLimits(max_jobs=5, max_tokens=32, max_model_len=32)

    def make(kernels: str) -> ModelRunner:
        ops.set_cpu_backend(kernels)
        cache = torch.full(shape, float("nan"))
        return ModelRunner(load_model(config, CPU), config, cache, CPU, limits)

    with same_kernels_afterwards():
        yield make


def generate(runner: ModelRunner, **how: Any) -> list[tuple[bytes, bytes, Any]]:
    def launch(step: Step) -> Callable[[], StepResult]:
        launched: Any = runner.launch(step)
        assert launched is not None
        answer: Callable[[], StepResult] = launched.answer
        return answer

    results = run_turns(launch, **how)
    return [(one.token_ids, one.logprobs, one.top_logprobs) for one in results]


@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_those_of_steps_that_waited(
    make_runner: Callable[[str], ModelRunner], sampled: bool
) -> None:
    expected = generate(make_runner("auto"), ahead=False, sampled=sampled)
    assert generate(make_runner("auto"), ahead=True, sampled=sampled) == expected
    assert any(logprobs for _, logprobs, _ in expected) == sampled


def test_tokens_of_a_gpus_kernels_too(make_runner: Callable[[str], ModelRunner]) -> None:
    """The kernels are interpreted, and decodes padded as for CUDA graphs."""
    expected = generate(make_runner("auto"), ahead=False)
    found = generate(make_runner("triton"), ahead=True)
    assert [token_ids for token_ids, _, _ in found] == [token_ids for token_ids, _, _ in expected]


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_token_that_no_step_chose_is_refused(
    make_runner: Callable[[str], ModelRunner], kernels: str
) -> None:
    runner = make_runner(kernels)

    def ahead(*rows: int) -> Step:
        step = Step.of(0, [(5, [9], [row]) for row in range(len(rows))])
        step.previous_rows = np.array(rows, dtype=np.int32).tobytes()
        return step

    with pytest.raises(IndexError, match="token 0 of the step before it, which chose 0"):
        runner.launch(ahead(0))
    for length in (1, 2):
        runner.run(Step.of(0, [(0, [5] * 5, [row]) for row in range(length)]))
    runner.run(ahead(1, -1))
    with pytest.raises(IndexError, match="token 2 of the step before it, which chose 2"):
        runner.launch(ahead(0, 2))
    runner.run(Step.of(0, [(0, [5] * 5, [0])], num_partial=1))
    with pytest.raises(IndexError, match="which chose 0"):
        runner.launch(ahead(0))
    assert isinstance(runner.run(ahead(-1)), StepResult)


def test_the_host_reads_no_token_to_put_it_into_a_step() -> None:
    last = LastTokens(ALONE)
    with emulated_gpu() as gpu:
        last.keep(3, torch.tensor([7, 8, 9]).to(DEVICE))
        token_ids = torch.tensor([5, -1, 0, -3]).to(DEVICE)
        gpu.waits.clear()
        last.fill_in(token_ids)
        assert gpu.waits == []
        assert token_ids.to("cpu").tolist() == [5, 9, 0, 7]


class HeldWatch(Stopwatch):
    """A device's watch that ends steps when the test says so, in any order."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.ended = threading.Event()

    def seconds(self) -> float:
        assert self.ended.wait(DEADLINE_S)
        return 0.0


class FailingWatch(Stopwatch):
    def seconds(self) -> float:
        raise RuntimeError("the device has failed")


def launched(step_id: int, watch: Stopwatch) -> LaunchedStep:
    return LaunchedStep(step_id, watch, tokens=None, is_last_stage=False)


def ended() -> HeldWatch:
    watch = HeldWatch()
    watch.ended.set()
    return watch


class Failures:
    def __init__(self) -> None:
        self.first: Exception | None = None
        self.came = threading.Event()

    def __call__(self, error: Exception) -> None:
        self.first = error
        self.came.set()


def test_answers_are_sent_in_order_and_all_before_it_closes() -> None:
    watches, failures, senders = [HeldWatch() for _ in range(3)], Failures(), set()
    sent: list[FromRank] = []

    def send(message: FromRank) -> None:
        senders.add(threading.current_thread())
        sent.append(message)

    answers = AnsweringThread(send, CPU, on_error=failures)
    for step_id, watch in enumerate(watches):
        answers.put(launched(step_id, watch))
    watches[1].ended.set()
    assert not sent
    for watch in watches:
        watch.ended.set()
    answers.close()
    assert sent == [StageDone(step_id, 0.0) for step_id in range(3)]
    assert threading.current_thread() not in senders
    assert failures.first is None


def test_an_error_in_an_answer_is_reported_and_nothing_is_sent_after_it() -> None:
    failures = Failures()
    sent: list[FromRank] = []

    answers = AnsweringThread(sent.append, CPU, on_error=failures)
    answers.put(launched(0, ended()))
    answers.put(launched(1, FailingWatch(CPU)))
    answers.put(launched(2, ended()))
    assert failures.came.wait(DEADLINE_S)
    assert sent == [StageDone(0, 0.0)]
    with pytest.raises(RuntimeError, match="has failed") as raised:
        answers.close()
    assert raised.value is failures.first


def test_a_device_that_never_ends_does_not_stop_the_rank_from_ending() -> None:
    watch = HeldWatch()
    answers = AnsweringThread(lambda message: None, CPU, on_error=Failures())
    answers.put(launched(0, watch))
    with pytest.raises(TimeoutError, match="last steps"):
        answers.close(timeout_s=0.01)
    watch.ended.set()
    answers.close()
