"""The ranks of an engine in this process, and how a test holds its jobs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from collector import Trigger
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.executor.distributed import DistributedExecutor
from waiting import DEADLINE_S


def executor_of(llm: LLM) -> DistributedExecutor:
    """The executor of its ranks; another one after each restart."""
    executor = llm.engine._supervisor.ranks.executor
    assert isinstance(executor, DistributedExecutor)
    return executor


def ranks_of(executor: DistributedExecutor) -> list[psutil.Process]:
    """The processes of this host's ranks, in order of rank."""
    return [psutil.Process(process.pid) for process, _ in list(executor._ranks._started)]


def rank_of(llm: LLM) -> psutil.Process:
    (rank,) = ranks_of(executor_of(llm))
    return rank


class RankHold:
    """Stops the only rank of an engine. While it is stopped, no job gets a token or ends."""

    def __init__(self, rank: psutil.Process) -> None:
        self._rank = rank
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """A sink may call this. Steps that the rank has finished may still bring tokens."""
        self._rank.suspend()
        self._is_stopped.set()

    def wait(self) -> None:
        """Waits until ``stop`` was called."""
        assert self._is_stopped.wait(DEADLINE_S)


@contextmanager
def rank_hold(llm: LLM) -> Iterator[RankHold]:
    """A hold that ends with the block. The engine takes jobs and cancellations meanwhile, and acts
    on them when the running step ends, which is after the block."""
    rank = rank_of(llm)
    try:
        yield RankHold(rank)
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.resume()


@contextmanager
def held_job(
    llm: LLM, params: SamplingParams, *, job_id: str = "j", prompt: tuple[int, ...] = (5,)
) -> Iterator[tuple[int, Trigger]]:
    """A job that has its first token and cannot end before the block does, however fast the rank
    is: it stands still during the block.

    Args:
        params: of a job that is much longer than the steps that are sent ahead.

    Yields its number and its sink.
    """
    with rank_hold(llm) as hold:
        sink = Trigger(1, hold.stop)
        number = llm.engine.submit(job_id, prompt, params, sink)
        hold.wait()
        yield number, sink
