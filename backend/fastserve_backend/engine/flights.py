"""Steps that the ranks have not finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastserve_backend.job import Job, JobState
from fastserve_backend.kv_cache.prefixes import PrefixCopies
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.scheduler.base import Scheduled


@dataclass(slots=True)
class Ahead:
    """That a running step counts as ended, because the step after it was to be chosen."""

    going_on: set[int]
    """The jobs for which it does, by number."""
    set_aside: list[Job] = field(default_factory=list)
    """Those of them that are not in the step after it."""


@dataclass(slots=True)
class Flight:
    """A step that was sent."""

    batch: list[Scheduled]
    """In the step's order: those that get a token first."""
    step: Step
    copies: PrefixCopies
    """That it makes."""
    started_s: float
    """When it was sent, or when the step that it was sent behind ended."""
    predicted_s: float | None = None
    """How long it takes, if that was asked."""
    ahead: Ahead | None = None
    """Set once the step after it has been chosen, be it in vain."""

    rows: dict[int, Job] = field(init=False)
    """The jobs of ``batch`` by number, in its order."""

    def __post_init__(self) -> None:
        self.rows = {job.number: job for job, _ in self.batch}

    @property
    def num_sampling(self) -> int:
        return len(self.rows) - self.step.num_partial

    @property
    def decides_masks(self) -> bool:
        """Whether what a job may go on with depends on the token that it gets."""
        sampling = self.step.sampling
        return sampling is not None and len(sampling.masks) > 0


def is_ending(job: Job) -> bool:
    """Whether the job has ended, or will with its pending token whatever that is."""
    return job.state is JobState.FINISHED or job.num_outputs >= job.params.max_tokens
