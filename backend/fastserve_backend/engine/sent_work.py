"""Work that the ranks have not finished: steps and copies of KV blocks."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastserve_backend.engine.step_builder import build_copy, build_disk_copy
from fastserve_backend.executor.base import Executor
from fastserve_backend.job import Job
from fastserve_backend.kv_cache.transfers import DiskTransfer, Transfer
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Step,
    StepResult,
)
from fastserve_backend.scheduler.base import Scheduled
from fastserve_backend.system.clock import Clock


@dataclass(slots=True)
class SentStep:
    """A step that the ranks run, or will run after the one before it."""

    batch: list[Scheduled]
    """Jobs and numbers of tokens, in the step's order: jobs that get a token come first."""
    step: Step
    is_behind: bool
    """Whether it was sent while the step before it ran."""
    started_s: float
    """When it was sent. If it was sent behind another: when that ended, as soon as it has."""
    predicted_s: float | None = None
    """Predicted duration; None until somebody asks for it."""
    jobs: dict[int, Job] = field(init=False)
    """The jobs of ``batch`` by number, in the same order."""

    def __post_init__(self) -> None:
        self.jobs = {job.number: job for job, _ in self.batch}

    @property
    def num_sampling(self) -> int:
        """Number of jobs that get a token."""
        return len(self.jobs) - self.step.num_partial

    def computed(self) -> Iterator[tuple[int, int]]:
        """For each job the number, and how many of its first tokens have been run when the step has
        ended."""
        starts, lengths = array("i", self.step.starts), array("i", self.step.query_lens)
        for number, start, length in zip(self.jobs, starts, lengths, strict=True):
            yield number, start + length

    @property
    def decides_choices(self) -> bool:
        """Whether what a job may choose next depends on the token that it gets in this step."""
        if self.step.sampling is None:
            return False
        return any(job.needs_last_token for job, _ in self.batch[: self.num_sampling])


class FinishedStep(NamedTuple):
    """A step and its result."""

    sent: SentStep
    result: StepResult
    ended_s: float
    elapsed_s: float
    """Seconds since ``sent.started_s``, without the time it waited between pipeline stages."""


class FinishedCopy(NamedTuple):
    """A copy and its result."""

    transfer: Transfer | DiskTransfer
    sent_s: float
    result: CopyResult


class SentWork:
    """Sends steps and copies to the ranks, receives what they finish, and counts the seconds.

    Used by the step loop's thread alone.
    """

    def __init__(self, executor: Executor, clock: Clock, counters: EngineCounters) -> None:
        self.executor = executor
        """Replaced when the ranks are; nothing may be unfinished then."""
        self.steps: deque[SentStep] = deque()
        """Unfinished steps, the oldest first."""
        # Unfinished, and when they were sent.
        self._copies: dict[int, tuple[Transfer | DiskTransfer, float]] = {}
        self._clock = clock
        self._counters = counters
        # End of the last step. None once the ranks had no step for another reason than the engine's
        # own work between two steps.
        self._last_result_s: float | None = None

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self._copies

    @property
    def jobs(self) -> dict[int, Job]:
        """The jobs of all unfinished steps, by number."""
        return {number: job for sent in self.steps for number, job in sent.jobs.items()}

    @property
    def job_numbers(self) -> set[int]:
        """The numbers of those jobs."""
        return set().union(*[sent.jobs for sent in self.steps])

    @property
    def num_jobs(self) -> int:
        """Sum of the jobs of all unfinished steps."""
        return sum(len(sent.batch) for sent in self.steps)

    def uses(self, job: Job) -> bool:
        """Whether an unfinished step runs the job."""
        return any(job.number in sent.jobs for sent in self.steps)

    def send_step(self, batch: list[Scheduled], step: Step, *, is_behind: bool) -> None:
        """``step`` must have been built from ``batch``."""
        started_s = self._clock.now()
        if self._last_result_s is not None and not self.steps:
            self._counters.between_s += started_s - self._last_result_s
        self.steps.append(SentStep(batch, step, is_behind, started_s))
        self.executor.submit(step)

    def send_copies(self, transfers: Sequence[Transfer], block_size: int) -> None:
        for transfer in transfers:
            self._send_copy(transfer, build_copy(transfer, block_size))

    def send_disk_copies(self, transfers: Sequence[DiskTransfer]) -> None:
        for transfer in transfers:
            self._send_copy(transfer, build_disk_copy(transfer))

    def _send_copy(self, transfer: Transfer | DiskTransfer, message: CopyBlocks | DiskCopy) -> None:
        self._copies[transfer.id] = transfer, self._clock.now()
        self.executor.copy(message)

    def receive(
        self, timeout_s: float | None, *, jobs_wait: bool
    ) -> FinishedStep | FinishedCopy | None:
        """Wait as ``Executor.collect`` does. If nothing is unfinished, only check the ranks.

        Args:
            jobs_wait: whether there are jobs. If no step runs, they wait for copies.

        Raises:
            EngineError: a rank died or stopped answering.
        """
        if self.steps:
            result = self.executor.collect(timeout_s)
        elif self._copies:
            result = self._receive_copy(jobs_wait)
        else:
            self._last_result_s = None
            self.executor.check()
            return None
        if isinstance(result, CopyResult):
            return FinishedCopy(*self._copies.pop(result.transfer_id), result)
        return None if result is None else self._finish_step(result)

    def forget(self) -> None:
        """The ranks are lost: nothing that was sent will finish."""
        self.steps.clear()
        self._copies.clear()
        self._last_result_s = None

    def _receive_copy(self, jobs_wait: bool) -> StepResult | CopyResult | None:
        started_s = self._clock.now()
        self._last_result_s = None
        result = self.executor.collect()
        if jobs_wait:
            self._counters.swap_stall_s += self._clock.now() - started_s
        return result

    def _finish_step(self, result: StepResult) -> FinishedStep:
        now = self._clock.now()
        sent = self.steps.popleft()
        elapsed_s = now - sent.started_s - result.waited_s
        self._counters.iterations += 1
        self._counters.compute_s += result.compute_s
        self._counters.iteration_s += elapsed_s
        self._last_result_s = now
        if self.steps and self.steps[0].is_behind:
            self.steps[0].started_s = now
        return FinishedStep(sent, result, now, elapsed_s)
