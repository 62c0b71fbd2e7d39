"""Jobs that may not choose every token: which of them wait for the mask of their next token.

A job with structured output is in a step only with the mask of its next token. The mask depends on
the token before, so the loop requests it when that token has come. Another process computes it
(``grammars``): there, neither a slow grammar nor a broken one holds up other jobs. A job whose mask
is late misses a step.

The rules of a request (``TokenRules``) narrow such masks. Without structured output, its allowed
tokens are the mask of each of its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol

from fastserve_backend.errors import InvalidRequestError, TenantLimitError
from fastserve_backend.grammars.messages import GrammarRefused, JobFailed, Mask, NewMasks
from fastserve_backend.grammars.structured_output import FIELD, StructuredOutput
from fastserve_backend.job import Job

# A mask takes 0.2 to 0.3 ms from request to answer, nearly all of it the way there and back. The
# next step waits for it at most this long. The job would lose more if it missed that step.
_WORTH_WAITING_S = 0.002


class MaskSource(Protocol):
    """Computes masks; ``grammars.client.GrammarClient`` describes the effects."""

    def begin_job(
        self,
        number: int,
        wanted: StructuredOutput,
        output_ids: array[int],
        *,
        spells_specials: bool,
        tenant: str,
    ) -> None: ...

    def accept_tokens(self, tokens: Sequence[tuple[int, int]]) -> None: ...

    def end_job(self, number: int) -> None: ...


class NoNextToken(NamedTuple):
    """A job that has to end, because no token may follow, or nobody can say which."""

    job: Job
    error: str


class MaskedJobs:
    """The unfinished jobs with masks. Other jobs may be passed to it, and are ignored.

    Used by the step loop's thread alone.

    Args:
        source: None if no job has structured output.
    """

    def __init__(self, source: MaskSource | None) -> None:
        self._source = source
        self._jobs: dict[int, Job] = {}
        self._waiting: set[int] = set()
        self._new_tokens: list[tuple[int, int]] = []  # (job, token); masks not requested yet
        self._awaited: set[int] = set()  # jobs that the next step waits for, until _wait_until_s
        self._wait_until_s = 0.0

    @property
    def waiting(self) -> Set[int]:
        """Numbers of the jobs that wait for a mask."""
        return self._waiting

    def worth_waiting_s(self, now: float) -> float:
        """Seconds for which the next step should wait for masks."""
        return max(0.0, self._wait_until_s - now) if self._awaited else 0.0

    def add(self, job: Job) -> NoNextToken | None:
        """A new job: its first mask is requested, or is that of its rules. Returned is a job whose
        rules allow no token after its earlier ones, or whose tenant has too many grammars that
        wait."""
        wanted = job.params.structured_output
        if wanted is None:
            job.mask = None if job.rules is None else job.rules.allowed
            return _without_choice(job)
        assert self._source is not None
        spells = not job.params.skip_special_tokens
        try:
            self._source.begin_job(
                job.number,
                wanted,
                job.answer_ids,
                spells_specials=spells,
                tenant=job.service.tenant,
            )
        except TenantLimitError as error:
            job.refusal = error
            return NoNextToken(job, str(error))
        self._jobs[job.number] = job
        self._waiting.add(job.number)
        return None

    def on_token(self, job: Job) -> NoNextToken | None:
        """The job has a new token. If it needs another mask, ``request_masks`` follows. Returned is
        a job whose rules allow no other token."""
        if job.number in self._jobs:
            job.mask = None
            self._waiting.add(job.number)
            self._new_tokens.append((job.number, job.output_ids[-1]))
            return None
        return _without_choice(job)

    def request_masks(self, now: float) -> None:
        """Request the masks that follow all new tokens, in one message."""
        if self._source is not None and self._new_tokens:
            self._source.accept_tokens(self._new_tokens)
            self._awaited |= {number for number, _ in self._new_tokens}
            self._wait_until_s = now + _WORTH_WAITING_S
            self._new_tokens = []

    def on_answer(self, answer: NewMasks | GrammarRefused | JobFailed) -> list[NoNextToken]:
        """Give jobs their masks, and return those that cannot go on."""
        if isinstance(answer, NewMasks):
            return [failed for mask in answer.masks if (failed := self._on_mask(mask)) is not None]
        job = self._jobs.get(answer.number)
        if job is None:
            return []
        wanted = job.params.structured_output
        assert wanted is not None
        name = f"{FIELD}.{wanted.kind}"
        if isinstance(answer, GrammarRefused):
            job.refusal = InvalidRequestError(name, wanted.text, answer.reason)
        return [NoNextToken(job, f"{name}: {answer.reason}")]

    def _on_mask(self, mask: Mask) -> NoNextToken | None:
        job = self._jobs.get(mask.number)
        if job is None or job.num_earlier + len(job.output_ids) != mask.num_tokens:
            return None
        job.mask = mask.bits if job.rules is None else job.rules.narrow(mask.bits)
        self._waiting.discard(job.number)
        self._awaited.discard(job.number)
        return _without_choice(job)

    def remove(self, job: Job) -> None:
        """The job has ended, for whatever reason."""
        if self._source is not None and self._jobs.pop(job.number, None) is not None:
            self._waiting.discard(job.number)
            self._awaited.discard(job.number)
            self._new_tokens = [one for one in self._new_tokens if one[0] != job.number]
            self._source.end_job(job.number)


def _without_choice(job: Job) -> NoNextToken | None:
    """The job, if its mask and the rules of its request leave no token. It is the client's mistake:
    the job gets a ``refusal``."""
    if job.rules is None or job.mask is None or not job.needs_last_token:
        return None
    if job.rules.leave_choice(job.mask, job.answer_ids):
        return None
    params = job.params
    given = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": len(params.bad_words) > 0,
        FIELD: params.structured_output is not None,
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    job.refusal = InvalidRequestError(
        names, f"{len(job.answer_ids)} tokens", "together they allow no token after these"
    )
    return NoNextToken(job, str(job.refusal))
