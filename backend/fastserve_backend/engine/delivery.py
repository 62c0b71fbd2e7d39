"""Turn new tokens into outputs for the clients: the host work that overlaps the next iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastserve_backend.checkpoints.tokenizer import Tokenizer
from fastserve_backend.engine.text_stream import TextStream
from fastserve_backend.job import FinishReason, Job, JobOutput, TokenLogprob
from fastserve_backend.rank_protocol.messages import StepResult

_log = logging.getLogger(__name__)
OnEnd = Callable[[Job, FinishReason], None]


@dataclass(frozen=True, slots=True)
class NewToken:
    """One job's part of a step's result."""

    token_id: int
    logprob: float
    """0 where the job asked for none."""
    top: tuple[tuple[int, float], ...]

    @classmethod
    def from_result(cls, result: StepResult) -> list[NewToken]:
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


class Delivery:
    """Owns the text of every unfinished job. Used by the engine's thread alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[Job, TextStream] = {}
        self._pending: list[tuple[Job, NewToken, FinishReason | None]] = []

    @property
    def is_empty(self) -> bool:
        """Whether no token waits for ``flush``."""
        return not self._pending

    def open(self, job: Job) -> None:
        self._texts[job] = TextStream(self._tokenizer, job.params.stop)

    def add(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        """A new token, already among the job's; ``reason`` if the job ends with it."""
        self._pending.append((job, token, reason))

    def flush(self, on_end: OnEnd) -> None:
        """Send all added tokens.

        Args:
            on_end: called before the last token of a job is sent, with why it ended: as ``add`` was
                told, or by a stop word.
        """
        pending, self._pending = self._pending, []
        for job, token, reason in pending:
            text, stop = self._text(job, token, reason)
            if stop:
                reason = FinishReason.STOP
            if reason is not None:
                del self._texts[job]
                on_end(job, reason)
            self._send(job, text, token, reason)

    def close(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        """End the job, whose end was not sent, without a further token."""
        del self._texts[job]
        self._pending = [item for item in self._pending if item[0] is not job]
        _emit(job, JobOutput("", (), (), reason, error, job.refusal, job.stats()))

    def close_all(self, reason: FinishReason, error: str) -> list[Job]:
        """End all jobs whose end was not sent; returns them."""
        jobs = list(self._texts)
        for job in jobs:
            self.close(job, reason, error)
        return jobs

    def _text(self, job: Job, token: NewToken, reason: FinishReason | None) -> tuple[str, bool]:
        stream = self._texts[job]
        may_stop = len(job.output_ids) >= job.params.min_tokens
        is_end = reason is FinishReason.STOP
        text, stop = stream.push(token.token_id, may_stop=may_stop, is_end=is_end)
        if reason is not None and not stop:
            text += stream.finish()
        return text, stop

    def _send(self, job: Job, text: str, token: NewToken, reason: FinishReason | None) -> None:
        logprobs: Sequence[TokenLogprob] = ()
        if job.params.logprobs is not None:
            logprobs = (TokenLogprob(token.token_id, token.logprob, token.top),)
        stats = job.stats() if reason is not None else None
        _emit(job, JobOutput(text, (token.token_id,), logprobs, reason, stats=stats))


def _emit(job: Job, output: JobOutput) -> None:
    if job.sink is None:
        return
    try:
        job.sink(output)
    except Exception:
        # One client's trouble must not end the loop that serves all the others.
        _log.exception("job %s: its sink raised", job.id)
