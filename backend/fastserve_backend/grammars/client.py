"""The engine's side of the grammars' process: tells it of jobs and tokens, and gets masks.

The process knows of a job only what follows from the job's grammar and tokens. So a process that
died or hangs is replaced, and the jobs go on. A job fails if two processes died while they owed it
an answer, because it may be why.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastserve_backend.dynamic_threshold import may_take_place
from fastserve_backend.errors import TenantLimitError
from fastserve_backend.grammars.messages import (
    AcceptTokens,
    BeginJob,
    EndJob,
    FromGrammars,
    JobFailed,
    NewMasks,
    TimeUsed,
    Vocabulary,
    from_grammars_decoder,
)
from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.system.helper_process import HelperProcess

# Different grammars that wait to be compiled, at most: they may be 64 KiB each.
MAX_WAITING = 256
# A second of processor time compiles one of the most expensive grammars.
_RETRY_S = 1.0
# Jobs that begin wait while so many bytes wait to be sent: many jobs may have the same grammar.
_MAX_UNSENT_BYTES = 4 << 20
# A process that owes an answer and is silent for so long has lost its way. Far above what compiling
# a few grammars takes beside ranks that use all cores.
ANSWER_TIMEOUT_S = 60.0
_MAX_DEATHS = 2


@dataclass(slots=True)
class _Job:
    wanted: StructuredOutput
    spells_specials: bool
    tenant: str
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    asked_s: float | None = None
    """Since when it waits for an answer, to ``BeginJob`` or to its last token; None: it does
    not."""
    is_sent: bool = False
    """The running process knows of it."""
    has_begun: bool = False
    """It has had an answer to ``BeginJob``."""
    num_deaths: int = 0
    """How many processes died while they owed it an answer."""


class GrammarClient(HelperProcess[FromGrammars]):
    """Owns the process, which starts with the first job. All but ``close`` may be called from any
    thread, and return at once.

    Args:
        vocabulary: called by the helper's thread for each process.
        on_answer: called by the helper's thread for each ``begin_job`` and accepted token of a job
            that has not ended, also twice, and when a tenant has used processor time; must return
            at once.
    """

    name = "the process of the grammars"
    meanwhile = "jobs with structured output wait until it is back"

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], on_answer: Callable[[FromGrammars], None]
    ) -> None:
        super().__init__(["-m", "fastserve_backend.grammars"], from_grammars_decoder)
        self._vocabulary = vocabulary
        self._on_answer = on_answer
        # The lock guards all that follows.
        self._jobs: dict[int, _Job] = {}
        self._unsent: deque[int] = deque()  # jobs that the process is to begin
        self._waiting: dict[str, Counter[str]] = {}
        """By tenant: the texts of its jobs that have not begun, and how many jobs have each."""
        self._has_vocabulary = False  # the process: it takes jobs

    def begin_job(
        self,
        number: int,
        wanted: StructuredOutput,
        output_ids: array[int] | None = None,
        *,
        spells_specials: bool = False,
        tenant: str = "",
    ) -> None:
        """Ask for the mask of a new job's next token.

        Args:
            output_ids: the output that it has already; None: none.
            spells_specials: the job's special tokens have text, so that the grammar may allow them.

        Raises:
            TenantLimitError: too many different grammars of the tenant wait to be compiled.
        """
        with self.lock:
            self._take_place(tenant, wanted.text)
            output = array("i", output_ids or ())
            self._jobs[number] = _Job(wanted, spells_specials, tenant, output, time.monotonic())
            self._unsent.append(number)
            self._send_unsent()
            self.start()

    def accept_tokens(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Ask for the next masks of jobs that have one more token each.

        Args:
            tokens: number of the job, id of the token.
        """
        with self.lock:
            known = []
            for number, token_id in tokens:
                job = self._jobs.get(number)
                if job is None:
                    continue  # it has failed, and the engine is about to hear of it
                job.output_ids.append(token_id)
                job.asked_s = time.monotonic()
                if job.is_sent:  # else its tokens go with ``BeginJob``
                    known.append((number, token_id))
            if known:
                self.send(AcceptTokens(known))

    def end_job(self, number: int) -> None:
        """The job is over; unknown numbers are ignored."""
        with self.lock:
            job = self._jobs.pop(number, None)
            if job is None:
                return
            self._leave_place(job)
            if job.is_sent:
                self.send(EndJob(number))
            else:
                self._unsent.remove(number)

    def close(self) -> None:
        """End the process; idempotent. No job is told of it."""
        with self.lock:
            self._forget_all()
        self.stop(0.0)

    # --- With the lock held -------------------------------------------------------------------

    def _send_unsent(self) -> None:
        while self._has_vocabulary and self._unsent and self.num_unsent_bytes < _MAX_UNSENT_BYTES:
            number = self._unsent[0]
            job = self._jobs[number]
            begin = BeginJob(
                number,
                job.wanted.kind,
                job.wanted.text,
                job.output_ids.tobytes(),
                job.spells_specials,
                job.tenant,
            )
            if not self.send(begin):
                return  # it has died, and ``on_ended`` follows
            self._unsent.popleft()
            job.is_sent = True

    def _take_place(self, tenant: str, text: str) -> None:
        """Raises TenantLimitError."""
        waiting = self._waiting.setdefault(tenant, Counter())
        if text not in waiting:
            num_free = MAX_WAITING - sum(map(len, self._waiting.values()))
            if not may_take_place(len(waiting), num_free, 1 / len(self._waiting)):
                held = f"{len(waiting)} of the {MAX_WAITING} grammars that may wait to be compiled"
                if not waiting:
                    del self._waiting[tenant]
                raise TenantLimitError(tenant, f"has {held}", _RETRY_S)
        waiting[text] += 1

    def _leave_place(self, job: _Job) -> None:
        """The job has begun, or has ended."""
        if job.has_begun:
            return
        job.has_begun = True
        waiting = self._waiting[job.tenant]
        waiting[job.wanted.text] -= 1
        if not waiting[job.wanted.text]:
            del waiting[job.wanted.text]
        if not waiting:
            del self._waiting[job.tenant]

    def _forget_all(self) -> None:
        self._jobs.clear()
        self._unsent.clear()
        self._waiting.clear()

    def is_needed(self) -> bool:
        return bool(self._jobs)

    def patience(self) -> tuple[float, float]:
        asked = (job.asked_s for job in self._jobs.values() if job.asked_s is not None)
        return min(asked, default=math.inf), ANSWER_TIMEOUT_S

    # --- The helper's thread ------------------------------------------------------------------

    def on_started(self) -> None:
        vocabulary = self._vocabulary()
        with self.lock:
            self.send(vocabulary)
            self._has_vocabulary = True
            self._send_unsent()

    def on_message(self, message: FromGrammars) -> None:
        with self.lock:
            for number, num_tokens in _answered(message):
                job = self._jobs.get(number)
                if job is not None:
                    if num_tokens in (None, len(job.output_ids)):
                        job.asked_s = None
                    self._leave_place(job)
            self._send_unsent()
        self._on_answer(message)

    def on_ended(self) -> None:
        """Jobs to which a second process died owing an answer fail; the others begin anew."""
        with self.lock:
            self._has_vocabulary = False
            for job in self._jobs.values():
                job.num_deaths += job.is_sent and job.asked_s is not None
                job.is_sent = False
            failed = [n for n, job in self._jobs.items() if job.num_deaths == _MAX_DEATHS]
            for number in failed:
                self._leave_place(self._jobs.pop(number))
            self._unsent = deque(self._jobs)
        self._fail(failed, "the process that checks outputs died at it")

    def on_restart_refused(self, limit: str) -> None:
        with self.lock:
            failed = list(self._jobs)
            self._forget_all()
        self._fail(failed, f"the process that checks outputs failed: {limit}")

    def _fail(self, numbers: Sequence[int], reason: str) -> None:
        """For jobs that ``end_job`` no longer finds."""
        for number in numbers:
            self._on_answer(JobFailed(number, reason))


def _answered(message: FromGrammars) -> list[tuple[int, int | None]]:
    """Numbers of jobs, and for how many output tokens each has its answer; None: for all."""
    if isinstance(message, NewMasks):
        return [(mask.number, mask.num_tokens) for mask in message.masks]
    if isinstance(message, TimeUsed):
        return []
    return [(message.number, None)]
