"""A rank that dies or stops is named, and takes the others with it; none stays behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastserve_backend import SamplingParams
from fastserve_backend.errors import ConfigError
from fastserve_backend.executor import rank_processes
from fastserve_backend.job import FinishReason, JobOutput
from parallel_models import POSITIONS, ParallelLLM, ranks_of, wait_until

LONG = SamplingParams(max_tokens=POSITIONS - 8, ignore_eos=True)


def all_ended(ranks: Sequence[psutil.Process]) -> bool:
    return not any(rank.is_running() for rank in ranks)


def run_jobs(llm: ParallelLLM, count: int = 6) -> list[JobOutput]:
    """Submits jobs and returns once tokens come; the list then fills with their outputs."""
    outputs: list[JobOutput] = []
    for number in range(count):
        llm.engine.submit(f"j{number}", [5] * 4, LONG, outputs.append)
    wait_until(lambda: len(outputs) > 0)
    return outputs


def ends(outputs: list[JobOutput]) -> list[JobOutput]:
    return [output for output in list(outputs) if output.finish_reason is not None]


@pytest.mark.parametrize(("tensor_size", "num_stages", "victim"), [(2, 1, 1), (2, 2, 1)])
def test_a_killed_rank_is_named_at_once(
    tensor_size: int, num_stages: int, victim: int, small_opt: Path, tokenizer: Path
) -> None:
    with ParallelLLM(small_opt, tokenizer, tensor_size, num_stages) as llm:
        outputs = run_jobs(llm)
        ranks = ranks_of(llm.executor)
        assert len(ranks) == tensor_size * num_stages
        ranks[victim].kill()
        killed_s = time.monotonic()
        wait_until(lambda: len(ends(outputs)) == 6)
        assert time.monotonic() - killed_s < 3
        for output in ends(outputs):
            assert output.finish_reason is FinishReason.ERROR
            assert output.error == f"rank {victim} died with exit code -9"
        wait_until(lambda: all_ended(ranks))
        assert time.monotonic() - killed_s < 3 + rank_processes.STOP_TIMEOUT_S


def test_a_stopped_rank_is_named_and_the_others_end(
    small_opt: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ParallelLLM(small_opt, tokenizer, 1, 2) as llm:
        monkeypatch.setattr(rank_processes, "HEARTBEAT_TIMEOUT_S", 4.0)
        outputs = run_jobs(llm)
        ranks = ranks_of(llm.executor)
        ranks[1].send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        wait_until(lambda: len(ends(outputs)) == 6)
        assert time.monotonic() - stopped_s < 4.0 + 3.0
        for output in ends(outputs):
            assert output.error == "rank 1 has not answered for 4 s"
        wait_until(lambda: all_ended(ranks))


def test_idle_ranks_cost_nothing_and_one_killed_is_named(small_opt: Path, tokenizer: Path) -> None:
    with ParallelLLM(small_opt, tokenizer, 2, 1) as llm:
        ranks = ranks_of(llm.executor)
        llm.generate([[5, 6]], SamplingParams(max_tokens=3), progress=False)
        before = [sum(rank.cpu_times()[:2]) for rank in ranks]
        started_s = time.monotonic()
        wait_until(lambda: time.monotonic() - started_s > 2.0)
        after = [sum(rank.cpu_times()[:2]) for rank in ranks]
        assert all(b - a < 0.3 for a, b in zip(before, after, strict=True))
        (answer,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3), progress=False)
        assert answer.finish_reason is not None
        ranks[1].kill()
        wait_until(lambda: llm.engine.failure == "rank 1 died with exit code -9", 5)
        wait_until(lambda: all_ended(ranks))


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
def test_what_cannot_be_divided_is_refused_before_a_rank_starts(
    keys: dict[str, Any], message: str, small_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastserve_backend import LLM

    def refuse(*arguments: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(rank_processes.RankProcesses, "start", refuse)
    with pytest.raises(ConfigError, match=message):
        LLM(str(small_opt), load_format="dummy", **keys)


def test_an_error_of_every_rank_is_one_error(small_opt: Path, tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.swap_space_gib: got 1e\+06; .* a rank"):
        ParallelLLM(small_opt, tokenizer, 2, 1, swap_space_gib=1e6)
