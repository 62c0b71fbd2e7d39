"""The systems that the papers compare with, each as a run of this engine.

Only scheduling and memory are compared: the rivals have this engine's iteration times. An iteration
may mix prefills with decodes, whereas vLLM at the papers' time ran prefills alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.walk import MergedWalk, OrderKey, Walk

from benchmarks.paper.simulated_runs import BLOCK_SIZE, MAX_MODEL_LEN, RECOMPUTE, Run, scheduler

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


class JobBatching(FCFS):
    """Job-level batching: the jobs of a batch start together, and the next batch starts when all of
    them have ended.

    FasterTransformer serves so (FastServe §2.2, and ORCA, Yu et al., OSDI 2022, §3). Three things
    flatter it here: a job counts as answered at its own end, not at the batch's. After that it
    costs nothing. Prompts are not padded to the longest.
    """

    name = "job_batching"

    def __init__(self, limits: BatchLimits) -> None:
        super().__init__(limits)
        self._last = -1  # the batch's job that arrived last
        self._num_unfinished = 0  # of the batch

    def remove(self, job: Job) -> None:
        super().remove(job)
        if job.number <= self._last:
            self._num_unfinished -= 1

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        if self._num_unfinished == 0:
            for _, job in zip(range(self.limits.max_seqs), self._jobs, strict=False):
                self._last = job.number
                self._num_unfinished += 1
        return MergedWalk(lambda place: self._of_batch(self._jobs.part(place).items()))

    def _of_batch(self, jobs: Iterator[tuple[OrderKey, Job]]) -> Iterator[tuple[OrderKey, Job]]:
        return takewhile(lambda item: item[1].number <= self._last, jobs)


def vllm(fcfs: Run) -> Run:
    """FCFS with paged KV on the device alone: a job whose blocks are needed computes it again."""
    return replace(fcfs, kv_cache=RECOMPUTE)


def orca(fcfs: Run) -> Run:
    """FCFS with room for the longest job kept for each, so that fewer run at a time."""
    run = vllm(fcfs)
    most = run.memory.num_blocks // (MAX_MODEL_LEN // BLOCK_SIZE)
    seats = run.scheduler.max_num_seqs
    assert seats != "auto"
    return replace(run, scheduler=scheduler("fcfs", min(seats, most)))


def faster_transformer(fcfs: Run) -> Run:
    """``JobBatching``, with room for the longest job kept for each."""
    return replace(orca(fcfs), policy_of=JobBatching)
