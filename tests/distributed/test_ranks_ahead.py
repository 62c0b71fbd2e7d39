"""Real ranks get a step before the previous step's tokens are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import behind_rank
import job_steps
import numpy as np
import pytest
from fastserve_backend.errors import EngineError
from fastserve_backend.executor import rank_processes
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import Step, StepResult
from job_steps import run_turns
from parallel_models import run_ranks_by, started_ranks
from test_flights import prefill
from waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("forked_ranks")

CACHE = {
    "block_size": job_steps.BLOCK_SIZE,
    "device_blocks": job_steps.NUM_BLOCKS,
    "swap_space_gib": 0,
}


def generate(executor: DistributedExecutor, **how: Any) -> list[tuple[bytes, bytes, Any]]:
    def answer() -> StepResult:
        while not isinstance(result := executor.collect(), StepResult):
            pass
        return result

    def launch(step: Step) -> Callable[[], StepResult]:
        executor.submit(step)
        return answer

    results = run_turns(launch, **how)
    return [(one.token_ids, one.logprobs, one.top_logprobs) for one in results]


@pytest.fixture(scope="module")
def two_ranks(small_opt: Path) -> Iterator[DistributedExecutor]:
    with started_ranks(small_opt, tensor_parallel_size=2, **CACHE) as (executor, _):
        yield executor


@pytest.fixture
def behind(
    small_opt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DistributedExecutor, Popen[bytes]]]:
    """A rank of ``behind_rank``, and its process."""
    run_ranks_by(behind_rank, tmp_path, monkeypatch)
    with started_ranks(small_opt, **CACHE) as (executor, _):
        yield executor, executor._ranks._started[0][0]


def test_ranks_of_a_stage_get_the_tokens_of_the_first(two_ranks: DistributedExecutor) -> None:
    expected = generate(two_ranks, ahead=False)
    assert generate(two_ranks, ahead=True) == expected


def test_a_thread_answers_for_a_rank_that_goes_on(
    two_ranks: DistributedExecutor,
    behind: tuple[DistributedExecutor, Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, process = behind
    expected = [token_ids for token_ids, _, _ in generate(two_ranks, ahead=False)]
    assert [token_ids for token_ids, _, _ in generate(executor, ahead=True)] == expected
    for step_id in range(2):
        executor.submit(prefill(step_id, 0))
    monkeypatch.setattr(rank_processes, "STOP_TIMEOUT_S", DEADLINE_S)  # it is not killed
    executor.close()
    assert process.returncode == 0


def test_an_error_of_that_thread_ends_the_rank(
    behind: tuple[DistributedExecutor, Popen[bytes]],
) -> None:
    executor, process = behind
    executor.submit(prefill(behind_rank.FAILING_STEP, 0))
    with pytest.raises(EngineError, match="rank 0: RuntimeError: the device has failed"):
        executor.collect()
    assert process.wait(DEADLINE_S) == 1


def test_a_rank_refuses_a_token_that_no_step_chose(
    behind: tuple[DistributedExecutor, Popen[bytes]],
) -> None:
    executor, process = behind
    step = prefill(0, 0, 1)
    step.num_decodes, step.starts = 1, np.array([8], np.int32).tobytes()
    step.previous_rows = np.array([0], np.int32).tobytes()
    executor.submit(step)
    with pytest.raises(EngineError, match="rank 0: IndexError: step 0 takes token 0"):
        executor.collect()
    assert process.wait(DEADLINE_S) == 1
