"""Turn new tokens into outputs for the clients: host work that overlaps the running step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastserve_backend.checkpoints.tokenizer import Tokenizer
from fastserve_backend.engine.text_stream import TextStream
from fastserve_backend.job import FinishReason, Job, JobOutput
from fastserve_backend.logprobs import TokenLogprob
from fastserve_backend.rank_protocol.messages import StepResult

_log = logging.getLogger(__name__)
OnJobEnd = Callable[[Job, FinishReason], None]


@dataclass(frozen=True, slots=True)
class NewToken:
    """One job's part of a step's result."""

    token_id: int
    logprob: float
    """0 if the job did not ask for it."""
    top: tuple[tuple[int, float], ...]
    """The most likely (token id, log-probability) pairs; empty if the job did not ask for them."""

    @classmethod
    def from_result(cls, result: StepResult) -> list[NewToken]:
        """The tokens of a step, in the order of its jobs."""
        token_ids = np.frombuffer(result.token_ids, dtype=np.int32).tolist()
        if not result.logprobs:
            return [cls(token_id, 0.0, ()) for token_id in token_ids]
        logprobs = np.frombuffer(result.logprobs, dtype=np.float32).tolist()
        tops: dict[int, tuple[tuple[int, float], ...]] = {}
        for top in result.top_logprobs:
            ids = np.frombuffer(top.token_ids, dtype=np.int32).tolist()
            values = np.frombuffer(top.logprobs, dtype=np.float32).tolist()
            tops[top.row] = tuple(zip(ids, values, strict=True))
        return [
            cls(token_id, logprob, tops.get(row, ()))
            for row, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
        ]


class Delivery(Protocol):
    """Takes the tokens of all unfinished jobs, and tells each job's client of its end."""

    @property
    def is_empty(self) -> bool:
        """Whether no token waits for ``flush_tokens``."""
        ...

    def open_stream(self, job: Job) -> None:
        """A new job, before its first token."""
        ...

    def add_token(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        """The newest token of ``job.output_ids``; ``reason`` if the job ends with it."""
        ...

    def flush_tokens(self, on_job_end: OnJobEnd) -> None:
        """Send all added tokens.

        Args:
            on_job_end: called just before a job's last token is sent, with the reason for its end:
                the one given to ``add_token``, or STOP if a stop word ends it.
        """
        ...

    def end_stream(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        """End the job at once, without its tokens that wait. Its end must not have been sent."""
        ...

    def end_all_streams(self, reason: FinishReason, error: str) -> list[Job]:
        """The same for all jobs; returns them."""
        ...


class TextDelivery:
    """Sends each job's text to its sink. Used by the engine's thread alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[Job, TextStream] = {}
        self._undelivered: list[tuple[Job, NewToken, FinishReason | None, bool]] = []

    @property
    def is_empty(self) -> bool:
        return not self._undelivered

    def open_stream(self, job: Job) -> None:
        params = job.params
        text = self._texts[job] = TextStream(
            self._tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            stop_not_between=params.stop_not_between,
        )
        text.resume(job.earlier_ids)

    def add_token(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        is_first = len(job.output_ids) == 1
        self._undelivered.append((job, token, reason, is_first))

    def flush_tokens(self, on_job_end: OnJobEnd) -> None:
        undelivered, self._undelivered = self._undelivered, []
        for job, token, reason, is_first in undelivered:
            text, is_stopped = self._text_of(job, token, reason)
            if is_stopped:
                reason = FinishReason.STOP
            if reason is not None:
                del self._texts[job]
                on_job_end(job, reason)
            _send_token(job, text, token, reason, is_first=is_first)

    def end_stream(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        del self._texts[job]
        self._undelivered = [item for item in self._undelivered if item[0] is not job]
        _send_output(job, JobOutput("", (), (), reason, error, job.refusal, job.stats()))

    def end_all_streams(self, reason: FinishReason, error: str) -> list[Job]:
        jobs = list(self._texts)
        for job in jobs:
            self.end_stream(job, reason, error)
        return jobs

    def _text_of(self, job: Job, token: NewToken, reason: FinishReason | None) -> tuple[str, bool]:
        """The text that the token releases, and whether it completes a stop word."""
        stream = self._texts[job]
        may_stop = len(job.output_ids) >= job.params.min_tokens
        is_end = reason is FinishReason.STOP
        text, is_stopped = stream.push(token.token_id, may_stop=may_stop, is_end=is_end)
        if reason is not None and not is_stopped:
            text += stream.finish()
        return text, is_stopped


def _send_token(
    job: Job, text: str, token: NewToken, reason: FinishReason | None, *, is_first: bool
) -> None:
    logprobs: Sequence[TokenLogprob] = ()
    if job.params.logprobs is not None:
        logprobs = (TokenLogprob(token.token_id, token.logprob, token.top),)
    stats = job.stats() if reason is not None else None
    prompt_logprobs = job.prompt_logprobs if is_first else None
    output = JobOutput(
        text, (token.token_id,), logprobs, reason, stats=stats, prompt_logprobs=prompt_logprobs
    )
    _send_output(job, output)


def _send_output(job: Job, output: JobOutput) -> None:
    if job.sink is None:
        return
    try:
        job.sink(output)
    except Exception:
        # One client's trouble must not end the loop that serves all the others.
        _log.exception("job %s: its sink raised", job.id)
