"""Jobs with structured output: which of them wait for what their next token may be.

Such a job is in a step only with the mask of its next token, and that depends on the token before.
It is asked for when that has come, and computed by another process (``grammars``), so that neither
a slow grammar nor a broken one holds up other jobs: a job whose mask is late misses a step.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.grammars.messages import FromGrammars, GrammarRefused, NewMasks
from fastserve_backend.job import Job
from fastserve_backend.structured_output import FIELD, StructuredOutput

MaskAnswer = FromGrammars

# Most masks take hundredths of a millisecond, and two or three tenths to be asked for and to come.
# Waiting for them costs the jobs of the next step this at most, and missing a step costs the job
# more.
_WORTH_WAITING_S = 0.002


class Masks(Protocol):
    """Who computes masks: ``grammars.client.GrammarClient`` describes the effects."""

    def begin(self, number: int, wanted: StructuredOutput) -> None: ...

    def accept(self, tokens: Sequence[tuple[int, int]]) -> None: ...

    def end(self, number: int) -> None: ...


class MaskedJobs:
    """The unfinished jobs with structured output, by number. Jobs of other kinds are passed over.
    Used by the step loop's thread alone.

    Args:
        masks: None: there are no such jobs.
    """

    def __init__(self, masks: Masks | None) -> None:
        self._masks = masks
        self._jobs: dict[int, Job] = {}
        self._waiting: set[int] = set()
        self._tokens: list[tuple[int, int]] = []  # not asked about yet
        self._awaited: set[int] = set()  # by the next step
        self._wait_until_s = 0.0

    @property
    def waiting(self) -> Set[int]:
        """Numbers of those without a mask."""
        return self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def worth_waiting_s(self, now: float) -> float:
        return max(0.0, self._wait_until_s - now) if self._awaited else 0.0

    def add(self, job: Job) -> None:
        if job.params.structured_output is not None:
            assert self._masks is not None
            self._jobs[job.number] = job
            self._waiting.add(job.number)
            self._masks.begin(job.number, job.params.structured_output)

    def has_token(self, job: Job) -> None:
        """One more, the last of its output; ``ask`` follows."""
        if job.number in self._jobs:
            job.mask = None
            self._waiting.add(job.number)
            self._tokens.append((job.number, job.output_ids[-1]))

    def ask(self, now: float) -> None:
        """What follows the new tokens?"""
        if self._masks is not None and self._tokens:
            self._masks.accept(self._tokens)
            self._awaited |= {number for number, _ in self._tokens}
            self._wait_until_s = now + _WORTH_WAITING_S
            self._tokens = []

    def answered(self, answer: MaskAnswer) -> tuple[Job, str] | None:
        """Jobs have their masks; or one is to end instead, for the reason that is returned."""
        if isinstance(answer, NewMasks):
            for mask in answer.masks:
                job = self._jobs.get(mask.number)
                if job is not None and len(job.output_ids) == mask.num_tokens:
                    job.mask = mask.bits
                    self._waiting.discard(job.number)
                    self._awaited.discard(job.number)
            return None
        job = self._jobs.get(answer.number)
        if job is None:
            return None
        wanted = job.params.structured_output
        assert wanted is not None
        name = f"{FIELD}.{wanted.kind}"
        if isinstance(answer, GrammarRefused):
            job.refusal = InvalidRequestError(name, wanted.text, answer.reason)
        return job, f"{name}: {answer.reason}"

    def remove(self, job: Job) -> None:
        """It has ended, for whatever reason."""
        if self._masks is not None and self._jobs.pop(job.number, None) is not None:
            self._waiting.discard(job.number)
            self._awaited.discard(job.number)
            self._tokens = [one for one in self._tokens if one[0] != job.number]
            self._masks.end(job.number)
