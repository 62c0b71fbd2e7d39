"""One of several ranks dies or hangs: all ranks are replaced, and every job continues."""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_ranks import ranks_of
from fastserve_backend import SamplingParams
from fastserve_backend.errors import ConfigError
from fastserve_backend.executor import rank_processes
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.executor.rank_processes import RankProcesses
from fastserve_backend.job import JobOutput
from hosts import listening
from parallel_models import VOCAB_SIZE, ParallelLLM
from waiting import DEADLINE_S, wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
NUM_JOBS = 10
# Limit for ranks to be replaced, which import torch, and for all jobs to end.
RESTART_S = 150.0
# Half of the blocks that the jobs need.
SHORT_OF_MEMORY = {"device_blocks": 28, "base_quantum_ms": 0.01}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [
        [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 50))] for _ in range(NUM_JOBS)
    ]


@pytest.fixture(scope="module")
def undisturbed(small_opt: Path, tokenizer: Path, prompts: list[list[int]]) -> list[list[int]]:
    with ParallelLLM(small_opt, tokenizer, 1, 1) as llm:
        answers = llm.generate(prompts, GREEDY, progress=False)
    return [answer.token_ids for answer in answers]


class Streams:
    """Streams the answers to all prompts from an engine.

    Args:
        on_output: called with the number of outputs of all jobs, on the engine's thread.
    """

    def __init__(
        self,
        llm: ParallelLLM,
        prompts: Sequence[Sequence[int]],
        on_output: Callable[[int], None],
    ) -> None:
        self._outputs: list[list[JobOutput]] = [[] for _ in prompts]

        def sink(outputs: list[JobOutput], output: JobOutput) -> None:
            outputs.append(output)
            on_output(sum(map(len, self._outputs)))

        for number, (prompt, outputs) in enumerate(zip(prompts, self._outputs, strict=True)):
            llm.engine.submit(f"job-{number}", prompt, GREEDY, partial(sink, outputs))

    @property
    def token_ids(self) -> list[list[int]]:
        return [[token for one in list(job) for token in one.token_ids] for job in self._outputs]

    def wait(self) -> None:
        """Waits until every job has ended."""
        wait_for(lambda: all(job and job[-1].finish_reason for job in self._outputs), RESTART_S)


def all_ended(ranks: Sequence[psutil.Process]) -> bool:
    return not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize(
    ("tensor_size", "num_stages", "victim", "end", "reason"),
    [
        (2, 1, 1, signal.SIGKILL, "rank 1 died with exit code -9 (SIGKILL: "),
        (2, 2, 2, signal.SIGKILL, "rank 2 died with exit code -9 (SIGKILL: "),
        (1, 2, 1, signal.SIGSTOP, "rank 1 has not answered for 4 s"),
    ],
)
def test_streams_outlive_a_killed_or_stopped_rank(
    tensor_size: int,
    num_stages: int,
    victim: int,
    end: signal.Signals,
    reason: str,
    small_opt: Path,
    tokenizer: Path,
    prompts: list[list[int]],
    undisturbed: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A rank that lost its connection to the dead one may report it before the death shows.
    monkeypatch.setattr(rank_processes, "DEATH_SHOWS_S", DEADLINE_S)
    with (
        caplog.at_level(logging.ERROR),
        ParallelLLM(small_opt, tokenizer, tensor_size, num_stages, **SHORT_OF_MEMORY) as llm,
    ):
        ranks = ranks_of(llm.executors[0])
        assert len(ranks) == tensor_size * num_stages
        all_are_here = threading.Event()

        def end_rank(num_outputs: int) -> None:
            if num_outputs == 100:
                assert all_are_here.wait(DEADLINE_S)
                ranks[victim].send_signal(end)
                if end is signal.SIGSTOP:  # the ranks that replace these have longer
                    llm.executors[0]._ranks._heartbeat_timeout_s = 4.0

        streams = Streams(llm, prompts, end_rank)
        all_are_here.set()
        wait_for(lambda: llm.engine.counters.worker_restarts == 1)
        wait_for(lambda: all_ended(ranks))
        streams.wait()
        assert streams.token_ids == undisturbed
        assert reason in caplog.text
        assert "; restarting the ranks" in caplog.text


def test_idle_ranks_cost_nothing_do_not_listen_and_one_that_dies_is_replaced(
    small_opt: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heartbeats: Counter[int] = Counter()
    on_message = RankProcesses.on_message

    def count(processes: RankProcesses, rank: int) -> None:
        heartbeats[rank] += 1
        on_message(processes, rank)

    with ParallelLLM(small_opt, tokenizer, 2, 1) as llm:
        ranks = ranks_of(llm.executors[0])
        assert not listening(ranks)
        llm.generate([[5, 6]], SamplingParams(max_tokens=3), progress=False)
        before = [sum(rank.cpu_times()[:2]) for rank in ranks]
        monkeypatch.setattr(RankProcesses, "on_message", count)
        wait_for(lambda: all(heartbeats[rank] >= 3 for rank in range(2)))  # one comes a second
        after = [sum(rank.cpu_times()[:2]) for rank in ranks]
        seconds = max(heartbeats.values())
        assert all(b - a < 0.1 * seconds for a, b in zip(before, after, strict=True))
        ranks[1].kill()
        wait_for(lambda: llm.engine.counters.worker_restarts == 1)
        assert "rank 1 died" in caplog.text  # its death was noticed, not its silence
        wait_for(lambda: all_ended(ranks))
        (answer,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3), progress=False)
        assert answer.finish_reason is not None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            r"parallel\.tensor_parallel_size: got 3; must divide the 4 heads .*: 1, 2, 4$",
        ),
        (
            {"pipeline_parallel_size": 4},
            r"parallel\.pipeline_parallel_size: got 4; must be from 1 to 3, the layers",
        ),
        (
            {"tensor_parallel_size": 0, "pipeline_parallel_size": 0},
            r"parallel\.tensor_parallel_size: got 0; [^\n]*\n.*pipeline_parallel_size: got 0",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_before_ranks_build_it(
    keys: dict[str, Any], message: str, small_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes may have started: they import torch while the engine reads the model."""
    from fastserve_backend import LLM

    def refuse(*arguments: object) -> None:
        raise AssertionError("ranks were told to build a model")

    monkeypatch.setattr(DistributedExecutor, "start", refuse)
    with pytest.raises(ConfigError, match=message):
        LLM(str(small_opt), load_format="dummy", **keys)


def test_an_error_of_every_rank_is_one_error(small_opt: Path, tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.swap_space_gib: got 1e\+06; .* a rank"):
        ParallelLLM(small_opt, tokenizer, 2, 1, swap_space_gib=1e6)
