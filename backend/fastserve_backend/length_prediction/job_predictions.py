"""The engine's use of the predictor: it asks about each job, teaches it, and counts its errors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastserve_backend.job import Job
from fastserve_backend.length_prediction.client import PredictorClient
from fastserve_backend.length_prediction.messages import Predicted
from fastserve_backend.length_prediction.prompt_text import cut, cut_tokens
from fastserve_backend.length_prediction.settings import PredictorSettings
from fastserve_backend.metrics.latency_histograms import Histogram

_log = logging.getLogger(__name__)

# A prediction takes milliseconds, but longer when the ranks use all cores.
_LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# Errors relative to the real length: 1 is "predicted twice as long, or no token at all".
_ERROR_BOUNDS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 2, 5, 10, 50)


@dataclass(slots=True)
class PredictionCounters:
    """Totals since the start. Only the engine's thread writes them. See docs/metrics.md."""

    predictions: Counter[str] = field(default_factory=Counter)
    """Jobs by the source of their prediction."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Jobs that ended without a prediction, by reason."""
    predicted_tokens: int = 0
    """Predicted output tokens of predicted jobs that the model ended."""
    real_tokens: int = 0
    """Real output tokens of the same jobs."""
    latency: Histogram = field(default_factory=lambda: Histogram(_LATENCY_BOUNDS_S))
    """Seconds from a job's arrival until the policy has its prediction."""
    relative_error: Histogram = field(default_factory=lambda: Histogram(_ERROR_BOUNDS))
    """|predicted - real| / real of predicted jobs that the model ended."""


@dataclass(slots=True)
class _Asked:
    arrival_s: float
    answer: Predicted | None = None


class JobPredictions:
    """The predictor of one engine.

    Any thread may call ``ask``, before ``on_job_ended`` for the same job. Only the engine's thread
    calls ``on_predicted`` and ``on_job_ended``.

    Args:
        decode: token ids to text, for prompts that arrived as ids.
        on_answer: called by any thread with each answer. The engine's thread must then pass the
            answer to ``on_predicted``.
    """

    def __init__(
        self,
        settings: PredictorSettings,
        decode: Callable[[Sequence[int]], str],
        on_answer: Callable[[Predicted], None],
    ) -> None:
        self.counters = PredictionCounters()
        self._decode = decode
        self._unfinished: dict[int, _Asked] = {}
        self._client = PredictorClient(settings.arguments(), on_answer)
        _log.info("lengths are predicted; kept in %s", settings.directory or "memory alone")

    @property
    def num_entries(self) -> int:
        """Prompts in the predictor's index."""
        return self._client.num_entries

    def text_of(self, prompt_ids: Sequence[int], prompt_text: str | None) -> str:
        """The text for ``ask``; ``prompt_text`` is None where there are only tokens."""
        if prompt_text is None:
            prompt_text = self._decode(cut_tokens(prompt_ids))
        return cut(prompt_text)

    def ask(self, job: Job, text: str) -> None:
        """Ask about a new job; returns at once."""
        self._unfinished[job.number] = _Asked(job.arrival_s)
        self._client.ask(job.number, text)

    def on_predicted(self, answer: Predicted, now: float) -> None:
        """The answer for a job. Answers for jobs that have ended are ignored."""
        asked = self._unfinished.get(answer.number)
        if asked is None:
            return
        asked.answer = answer
        if answer.num_tokens is not None:
            self.counters.predictions[answer.source] += 1
            self.counters.latency.observe(now - asked.arrival_s)

    def on_job_ended(self, job: Job) -> None:
        """The job has ended, for any reason. The predictor learns from it if the model ended it."""
        asked = self._unfinished.pop(job.number)
        real = len(job.output_ids) if job.ended_by_itself else None
        self._client.tell_end(job.number, real)
        predicted = job.predicted_tokens
        if predicted is None:
            self.counters.fallbacks[self._reason(asked)] += 1
        elif real:
            self.counters.predicted_tokens += predicted
            self.counters.real_tokens += real
            self.counters.relative_error.observe(abs(predicted - real) / real)

    def close(self) -> None:
        """The predictor's process saves what it learned and ends."""
        self._client.close()

    def _reason(self, asked: _Asked) -> str:
        if asked.answer is not None:
            return asked.answer.source
        return "slow" if self._client.is_loaded else "down"
